"""A decode call's arguments as one record, and the checks that need no device value: rank, shape, dtype, device, stride."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedmla.contract.errors import InvalidArgument
from pagedmla.contract.kv_layout import KVLayout, layout_of_dtype
from pagedmla.contract.problem import QUERY_DTYPES, DecodeProblem, check_softmax_scale, out_dtype_of

Scale = float | torch.Tensor | None


@dataclass(frozen=True)
class DecodeArguments:
    """What ``pagedmla.decode`` was called with; see there for the meaning of each field.

    ``q`` is the whole query [num_tokens, num_heads, head_dim_qk] when ``q_pe`` is None, else its latent part.
    """

    q: torch.Tensor
    q_pe: torch.Tensor | None
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    softmax_scale: float
    causal: bool
    kv_lora_rank: int
    q_scale: Scale = None
    kv_scale: Scale = None
    schedule: str | None = None
    num_kv_splits: int | None = None
    batch_invariant: bool = False
    workspace: torch.Tensor | None = None
    max_q_len: int | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of ``q``."""
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch."""
        return self.seq_lens.shape[0]

    @property
    def head_dim_qk(self) -> int:
        """Numbers of a whole query row."""
        return self.q.shape[2] + (self.q_pe.shape[2] if self.q_pe is not None else 0)

    @property
    def even_q_len(self) -> int | None:
        """Query tokens of every sequence when ``cu_seqlens_q`` was left out, else None."""
        if self.cu_seqlens_q is not None:
            return None
        return self.num_tokens // self.num_seqs if self.num_seqs else 0

    @property
    def most_query_tokens(self) -> int:
        """Query tokens of one sequence, at most: as far as the host knows, all of them."""
        known = self.even_q_len if self.even_q_len is not None else self.max_q_len
        # a promise of more than there are says nothing
        return self.num_tokens if known is None else min(known, self.num_tokens)

    @property
    def rows_hint(self) -> int:
        """(query token, head) pairs of a sequence: at most where the host knows, else of an average one."""
        if self.even_q_len is None and self.max_q_len is None:
            return self.num_heads * -(-self.num_tokens // max(1, self.num_seqs))
        return self.num_heads * self.most_query_tokens

    @property
    def shared_row_tiles(self) -> int:
        """Rows that every sequence with queries has a whole number of times, as far as the host knows; else 0."""
        if self.even_q_len is not None or self.most_query_tokens == 1:
            return self.num_heads * self.most_query_tokens
        return 0

    def problem(self) -> DecodeProblem:
        """The static half of the call.  For ragged queries ``max_q_len`` is what the host can know: every token in one."""
        return DecodeProblem(
            num_heads=self.num_heads,
            softmax_scale=self.softmax_scale,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.head_dim_qk - self.kv_lora_rank,
            page_size=self.kv_cache.shape[1],
            q_dtype=self.q.dtype,
            kv_layout=layout_of_dtype(self.kv_cache.dtype).name,
            max_q_len=max(1, self.most_query_tokens),
            causal=self.causal,
            schedule=self.schedule,
            num_kv_splits=self.num_kv_splits,
            batch_invariant=self.batch_invariant,
        )


def check_arguments(
    args: DecodeArguments, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> None:
    """Checks everything about ``args`` that the host knows.

    Raises:
        InvalidArgument: names the argument, what was wanted and what came.
    """
    check_softmax_scale(args.softmax_scale)
    _check_query(args)
    layout = _check_cache(args)
    _check_tables(args)
    _check_most_query_tokens(args)
    _check_scales(args, layout)
    _check_outputs(args, out, lse)
    if args.workspace is not None:
        expect(args.workspace, "workspace", (None,), (torch.uint8,), args.q.device, inner_stride=True)


def expect(
    tensor: torch.Tensor,
    name: str,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None,
    inner_stride: bool = False,
) -> None:
    """Raises InvalidArgument unless ``tensor`` has this shape (None: any size), one of the dtypes, and is on ``device``."""
    if tensor.dim() != len(shape):
        raise InvalidArgument(
            "rank", name, f"{len(shape)} dimensions", f"{tensor.dim()}: {list(tensor.shape)}"
        )
    for axis, size in enumerate(shape):
        if size is not None and tensor.shape[axis] != size:
            wanted = "[" + ", ".join("any" if want is None else str(want) for want in shape) + "]"
            raise InvalidArgument("shape", name, wanted, str(list(tensor.shape)))
    if tensor.dtype not in dtypes:
        raise InvalidArgument("dtype", name, " or ".join(str(dtype) for dtype in dtypes), str(tensor.dtype))
    if device is not None and tensor.device != device:
        raise InvalidArgument("device", name, f"a tensor on {device}, as q", f"one on {tensor.device}")
    if inner_stride and tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidArgument("stride", name, "inner stride 1", f"strides {tuple(tensor.stride())}")


def _check_query(args: DecodeArguments) -> None:
    name = "q" if args.q_pe is None else "q[0] (q_nope)"
    expect(args.q, name, (None, None, None), QUERY_DTYPES, None, inner_stride=True)
    rank = args.kv_lora_rank
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InvalidArgument("kv_lora_rank", "kv_lora_rank", "a whole number >= 1", repr(rank))
    if args.num_heads < 1:
        raise InvalidArgument("num_heads", name, "at least one head", str(list(args.q.shape)))
    if args.q_pe is None:
        if args.q.shape[2] < rank:
            wanted = f"[num_tokens, num_heads, kv_lora_rank {rank} + qk_rope_head_dim]"
            raise InvalidArgument("head_dim", "q", wanted, str(list(args.q.shape)))
    else:
        expect(args.q, name, (None, None, rank), QUERY_DTYPES, None)
        shape = (args.q.shape[0], args.q.shape[1], None)
        expect(args.q_pe, "q[1] (q_pe)", shape, (args.q.dtype,), args.q.device, inner_stride=True)
    rope = args.head_dim_qk - rank
    if rope % 2:
        raise InvalidArgument(
            "qk_rope_head_dim", name, "an even qk_rope_head_dim (RoPE turns pairs)", str(rope)
        )


def _check_cache(args: DecodeArguments) -> KVLayout:
    kv_cache = args.kv_cache
    layout = layout_of_dtype(kv_cache.dtype)
    width: int | None = args.head_dim_qk
    if layout.packed_bytes_per_token is not None:
        width = layout.packed_bytes_per_token
    expect(kv_cache, "kv_cache", (None, None, width), (layout.dtype,), args.q.device, inner_stride=True)
    if kv_cache.shape[1] < 1:
        raise InvalidArgument("page_size", "kv_cache", "page_size >= 1", str(list(kv_cache.shape)))
    return layout


def _check_tables(args: DecodeArguments) -> None:
    int32 = (torch.int32,)
    expect(args.seq_lens, "seq_lens", (None,), int32, args.q.device)
    expect(args.block_table, "block_table", (args.num_seqs, None), int32, args.q.device)
    if args.cu_seqlens_q is not None:
        expect(args.cu_seqlens_q, "cu_seqlens_q", (args.num_seqs + 1,), int32, args.q.device)
    elif args.num_tokens % args.num_seqs if args.num_seqs else args.num_tokens:
        wanted = f"the same number of query tokens for each of {args.num_seqs} sequences, or cu_seqlens_q"
        raise InvalidArgument("num_tokens", "q", wanted, f"{args.num_tokens} tokens")


def _check_most_query_tokens(args: DecodeArguments) -> None:
    if args.max_q_len is None or args.even_q_len is None or args.even_q_len <= args.max_q_len:
        return
    raise InvalidArgument(
        "max_q_len",
        "max_q_len",
        f"at least the {args.even_q_len} query tokens of every sequence",
        str(args.max_q_len),
    )


def _check_scales(args: DecodeArguments, layout: KVLayout) -> None:
    for name, scale, takes_scale, holder in (
        ("q_scale", args.q_scale, args.q.dtype.itemsize == 1, f"q of {args.q.dtype}"),
        ("kv_scale", args.kv_scale, layout.scaled, f"a {layout.name} cache"),
    ):
        if scale is None:
            continue
        if not takes_scale:
            raise InvalidArgument("scale", name, f"None for {holder}: only fp8 numbers are scaled", "a scale")
        check_scale(name, scale, args.q.device)


def check_scale(name: str, scale: object, device: torch.device) -> None:
    """Raises InvalidArgument unless ``scale`` is a number in range, or f32 of one element on ``device`` (not read)."""
    if not isinstance(scale, torch.Tensor):
        check_scale_number(name, scale)
    elif scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device:
        wanted = f"a float32 tensor of one element on {device}"
        got = f"{scale.dtype} of shape {list(scale.shape)} on {scale.device}"
        raise InvalidArgument("scale", name, wanted, got)


def check_scale_number(name: str, scale: object) -> float:
    """Returns a per-tensor scale given as a number.

    Raises:
        InvalidArgument: not a number, not finite, not positive, or zero or infinite once it is a float32.
    """
    try:
        return check_softmax_scale(scale)
    except InvalidArgument:
        wanted = "a positive number, finite in float32, or a float32 tensor of one element"
        raise InvalidArgument("scale", name, wanted, repr(scale)) from None


def _check_outputs(args: DecodeArguments, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    rows = (args.num_tokens, args.num_heads)
    if out is not None:
        expect(
            out,
            "out",
            (*rows, args.kv_lora_rank),
            (out_dtype_of(args.q.dtype),),
            args.q.device,
            inner_stride=True,
        )
    if lse is not None:
        expect(lse, "lse", rows, (torch.float32,), args.q.device)
