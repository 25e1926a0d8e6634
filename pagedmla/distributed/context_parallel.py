"""``ContextParallel``: decode over keys that are sharded across the ranks of a torch.distributed group.

Each rank attends to its own keys and gets a state, (out, lse) for every query and head.  The ranks exchange their states, and
each merges all of them in the order of the ranks (``pagedmla.merge_states``): the same bytes, the same arithmetic, so the
result has the same bits on every rank.  A rank without keys sends (0, -inf), which the merge takes for nothing.

Why states are gathered and not reduced: T query tokens, H heads, latent width r = 512, n ranks, out of 2 bytes.  One
all-gather of states: a rank receives (n - 1) T H (2 r + 4) bytes.  A ring all-reduce of f32 outs that were weighted by lse
receives 2 (n - 1) / n T H (4 r), with one more for the largest lse and the sum: more bytes up to n = 3, as many at 4, and
bits that depend on the order in which a library adds.  Where an engine's ranks hold heads of their own, states go to the rank
whose heads they are, which is (n - 1) / n T H (2 r + 4) received.

Rounding: a state's out has q's dtype, so for bf16 each rank's part is rounded once before the merge, which is float32, and once
after it.  float32 queries are exchanged as float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pagedmla
from pagedmla.contract.arguments import DecodeArguments, Scale, check_arguments
from pagedmla.contract.errors import InvalidArgument, PagedMLAError, check_type
from pagedmla.contract.problem import out_dtype_of
from pagedmla.contract.support import check_backend_name
from pagedmla.contract.target import Target
from pagedmla.decode import Query, decode, merge_states
from pagedmla.dispatch import backend_for
from pagedmla.distributed.agreement import Agreement
from pagedmla.distributed.local_decode import decode_local
from pagedmla.distributed.messages import StateMessage
from pagedmla.distributed.sharding import KeySharding, check_sharding


class ContextParallel:
    """Decode over sharded keys, for one group and one layout of the keys.

    Every rank of the group makes one (of several, in the same order) and calls ``decode`` together with the others.

    Args:
        sharding: which rank holds which token.
        group: the ranks.  None: the default group, or one rank where there is none: then ``decode`` is ``pagedmla.decode``.
        heads: "replicated": every rank has the queries of all heads.  "sharded": rank r has those of heads r * h ..
            (r + 1) * h - 1 and gets their result, as under tensor parallelism; queries are gathered first.
        check: whether the ranks compare what they call before they exchange anything.  True: in every call.  False: never.
            None: in every call where the tensors are on the CPU, else in the first call of each kind (shapes, dtypes, scalar
            arguments), which has to come before a graph is captured.
        timeout: seconds that a check waits for the slowest rank.  The collectives have the group's own time limit.

    Attributes:
        rank, num_ranks: of this process in the group.

    Raises:
        InvalidArgument: names the argument, what was wanted and what came; or this process is not in the group.
    """

    def __init__(
        self,
        sharding: KeySharding,
        group: dist.ProcessGroup | None = None,
        *,
        heads: str = "replicated",
        check: bool | None = None,
        timeout: float = 120.0,
    ) -> None:
        check_type("sharding", sharding, KeySharding)
        if heads not in ("replicated", "sharded"):
            raise InvalidArgument("heads", "heads", "'replicated' or 'sharded'", repr(heads))
        if check is not None and not isinstance(check, bool):
            raise InvalidArgument("type", "check", "a bool or None", type(check).__name__)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e6:
            raise InvalidArgument("timeout", "timeout", "seconds, more than 0", repr(timeout))
        self.sharding, self._heads, self._check = sharding, heads, check
        self._group = _resolve(group)
        self.rank = self._group.rank() if self._group is not None else 0
        self.num_ranks = self._group.size() if self._group is not None else 1
        self._agreement = None
        if self._group is not None and self.num_ranks > 1 and check is not False:
            self._agreement = Agreement(self._group, float(timeout))
        self._agreed: set[tuple[object, ...]] = set()

    def decode(
        self,
        q: Query,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        softmax_scale: float,
        cu_seqlens_q: Tensor | None = None,
        causal: bool = True,
        kv_lora_rank: int = 512,
        q_scale: Scale = None,
        kv_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        backend: str | None = None,
        schedule: str | None = None,
        num_kv_splits: int | None = None,
        batch_invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """``pagedmla.decode`` over the keys of all ranks; the result is on every rank.

        Args:
            q: the same on every rank: [num_tokens, num_heads, head_dim_qk] or the pair (q_nope, q_pe).  With sharded heads, of
                this rank's heads, as many on every rank.
            kv_cache: this rank's pages.  Their number and size may differ between ranks.
            block_table: i32 [num_seqs, max_pages], pages of this rank's tokens, in order.
            seq_lens: i32 [num_seqs], the same on every rank: GLOBAL lengths, this step's tokens included.
            cu_seqlens_q: i32 [num_seqs + 1], the same on every rank.
            causal: query j of n sees the keys at global positions 0 .. seq_len - n + j.
            the others: as for ``pagedmla.decode``; kv_scale may differ between ranks.

        Returns:
            (out, lse) as of ``pagedmla.decode`` over the whole cache.  With replicated heads the bits are the same on every
            rank.

        Raises:
            InvalidArgument: the caller's mistake; or, checked, ranks that differ or are absent: on every rank that is there,
                naming the ranks.
            Unsupported: refused by the backend.
        """
        options: dict[str, Any] = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "kv_lora_rank": kv_lora_rank,
            "q_scale": q_scale,
            "kv_scale": kv_scale,
            "backend": backend,
            "schedule": schedule,
            "num_kv_splits": num_kv_splits,
            "batch_invariant": batch_invariant,
        }
        tensors: dict[str, Any] = {
            "kv_cache": kv_cache,
            "block_table": block_table,
            "seq_lens": seq_lens,
            "cu_seqlens_q": cu_seqlens_q,
        }
        if self.num_ranks == 1:
            return decode(q, **tensors, out=out, lse=lse, **options)
        if self._agreement is not None:
            self._agree(self._agreement, q, tensors, options, out, lse)
        state = self._exchange(q, tensors, options)
        for given, value in ((out, state[0]), (lse, state[1])):
            if given is not None:
                given.copy_(value)
        return (state[0] if out is None else out), (state[1] if lse is None else lse)

    def _exchange(self, q: Query, tensors: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Attends to this rank's keys, sends the state, and merges what all ranks found."""
        options = options | {"sharding": self.sharding, "rank": self.rank, "num_ranks": self.num_ranks}
        first = q if isinstance(q, Tensor) else q[0]
        if first.shape[0] == 0:
            # nothing to exchange, on any rank
            return decode_local(q, **tensors, **options)
        device = first.device
        message = StateMessage(
            first.shape[0], first.shape[1], options["kv_lora_rank"], out_dtype_of(first.dtype)
        )
        received = message.empty(self.num_ranks, device)
        if self._heads == "replicated":
            sent = message.empty(1, device)
            out, lse = message.views(sent)
            decode_local(q, **tensors, **options, out=out[0], lse=lse[0])
            _all_gather(received.view(-1), sent.view(-1), self._group)
        else:
            out, lse = decode_local(self._gather_heads(q), **tensors, **options)
            sent = message.empty(self.num_ranks, device)
            for part, whole in zip(message.views(sent), (out, lse), strict=True):
                # rank r's heads, [n, T, h, ...]
                part.copy_(whole.unflatten(1, (self.num_ranks, -1)).transpose(0, 1))
            dist.all_to_all_single(received, sent, group=self._group)
        outs, lses = message.views(received)
        return merge_states(outs, lses)

    def _gather_heads(self, q: Query) -> Tensor:
        """[num_tokens, n * h, head_dim_qk]: the queries of all ranks' heads; a view, whose memory has heads outermost."""
        mine = (q if isinstance(q, Tensor) else torch.cat(q, dim=2)).transpose(0, 1).contiguous()
        heads, num_tokens, width = mine.shape
        gathered = mine.new_empty(self.num_ranks * heads, num_tokens, width)
        # as bytes: not every library knows the 8-bit floats
        _all_gather(gathered.view(torch.uint8).view(-1), mine.view(torch.uint8).view(-1), self._group)
        return gathered.transpose(0, 1)

    def _agree(
        self,
        agreement: Agreement,
        q: Query,
        tensors: dict[str, Any],
        options: dict[str, Any],
        out: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        on_device = any(isinstance(t, Tensor) and t.device.type != "cpu" for t in _parts(q))
        first_only = self._check is None and on_device
        signature = _signature(q, tensors, options, out, lse)
        if first_only and signature in self._agreed:
            return
        if on_device and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            wanted = "the same call once before the capture, or check=False"
            raise InvalidArgument(
                "capture", "check", wanted, "a call to be checked while a graph is captured"
            )
        try:
            call = self._describe(q, tensors, options, out, lse)
        except PagedMLAError as error:
            agreement.check(error)
            raise
        agreement.check(call)
        self._agreed.add(signature)

    def _describe(
        self,
        q: Query,
        tensors: dict[str, Any],
        options: dict[str, Any],
        out: Tensor | None,
        lse: Tensor | None,
    ) -> dict[str, str]:
        """All that must be the same on every rank, after this rank's arguments were checked as its decode would."""
        parts = _parts(q)
        backend = options["backend"]
        check_backend_name(backend)
        for name, value in (*(("q", part) for part in parts), *tensors.items(), ("out", out), ("lse", lse)):
            if not isinstance(value, Tensor) and not (value is None and name in _OPTIONAL):
                raise InvalidArgument("type", name, "a tensor", type(value).__name__)
        given = {name: value for name, value in options.items() if name != "backend"}
        args = DecodeArguments(q=parts[0], q_pe=parts[1] if len(parts) == 2 else None, **tensors, **given)
        check_arguments(args, out, lse)
        check_sharding(self.sharding, args.num_seqs, args.q.device)
        every_head = args.num_heads * (self.num_ranks if self._heads == "sharded" else 1)
        problem = replace(args.problem(), num_heads=every_head, causal=False)
        if args.causal:
            problem = replace(problem, max_q_len=1)
        backend_for(args, problem, Target.detect(args.q.device), backend)
        trains = torch.is_grad_enabled() and any(part.requires_grad for part in (*parts, args.kv_cache))
        return {
            "pagedmla": pagedmla.__version__,
            "sharding": str(self.sharding),
            "heads": self._heads,
            "q": f"[{args.num_tokens}, {args.num_heads}, {args.head_dim_qk}] {args.q.dtype} on {args.q.device.type}",
            "kv_cache": f"{args.kv_cache.dtype}",
            "seq_lens": f"{args.num_seqs} sequences",
            "cu_seqlens_q": "left out" if args.cu_seqlens_q is None else "given",
            "softmax_scale": repr(float(args.softmax_scale)),
            "causal": str(args.causal),
            "kv_lora_rank": str(args.kv_lora_rank),
            "requires_grad": str(trains),
        }


_OPTIONAL = ("cu_seqlens_q", "out", "lse")


def _all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> None:
    # torch 2.13 renamed it; 2.11 has the old name alone
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent, group=group)


def _resolve(group: object) -> dist.ProcessGroup | None:
    if not dist.is_available() or not dist.is_initialized():
        if group is None:
            return None
        raise InvalidArgument("group", "group", "None, as there is no process group", type(group).__name__)
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        # new_group() returns a number to processes that it leaves out
        wanted = "a ProcessGroup that this process is in, or None"
        raise InvalidArgument("group", "group", wanted, type(group).__name__)
    return group


def _parts(q: object) -> tuple[Any, ...]:
    return tuple(q) if isinstance(q, (tuple, list)) and len(q) == 2 else (q,)


def _signature(
    q: Query, tensors: dict[str, Any], options: dict[str, Any], out: Tensor | None, lse: Tensor | None
) -> tuple[object, ...]:
    """What tells kinds of calls apart on the host, cheaply."""
    given = (*_parts(q), *tensors.values(), out, lse, *options.values())
    return tuple(
        (tuple(value.shape), value.dtype, value.device, value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for value in given
    )
