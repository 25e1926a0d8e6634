"""FlashMLA's dense decode, ``get_mla_metadata`` and ``flash_mla_with_kvcache``, over ``pagedmla.decode``.

Signatures: deepseek-ai/FlashMLA, flash_mla/flash_mla_interface.py at 02fe0d02e83f, whose metadata is an object that the first
call fills.  The two generations before it pass: metadata as tensors, made from (cache_seqlens, num_heads_per_head_k,
num_heads_k), and the same with (num_heads_q, is_fp8_kvcache, topk) after them.  FlashMLA is not needed.

What differs from FlashMLA:

- ``lse`` of a row that sees no key is -inf; theirs is +inf.  exp(-inf) is 0, so plain log-sum-exp arithmetic merges such a row
  as the nothing that it is, where +inf would drown the other state.  Both fail ``isfinite``; code that looks for ``== inf``
  has to look for ``isinf``.
- Pages of any size (theirs: 64), any ``head_dim_v`` up to the head size (512), float32 too, any device that a backend takes.
- The metadata carries nothing that a kernel reads: the work is shared out on the device in every call, from the lengths that
  it is given.  So metadata made once, for other lengths or another batch, is never stale.
- Refused by name: the sparse decode with its fp8 cache and attention sinks, and more than one KV head.

The trap that stays: left out, ``softmax_scale`` is ``q.shape[-1] ** -0.5``, as theirs.  That is the head size AFTER absorption
(576).  A model was trained with the one before it: DeepSeek-V2 and V3 want ``192 ** -0.5`` times YaRN's factor squared.
"""

from __future__ import annotations

import operator

import torch

from pagedmla.contract.arguments import expect
from pagedmla.contract.errors import InvalidArgument, Unsupported, check_type
from pagedmla.contract.target import Target
from pagedmla.decode import decode

# fields of a row of FlashMLA's tile schedule, and query rows of one of its tiles
_SCHEDULE_FIELDS = 8
_TILE_ROWS = 64
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FlashMLASchedMeta:
    """What ``get_mla_metadata()`` returns when it is told no lengths.  It holds nothing: no kernel of ours reads a schedule."""


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_heads_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_q_tokens_per_head_k: int | None = None,
) -> tuple[torch.Tensor | FlashMLASchedMeta, torch.Tensor | None]:
    """The metadata that ``flash_mla_with_kvcache`` takes; made without waiting for the device.

    Args:
        cache_seqlens: i32 [batch_size], tokens; its values are not read.  Left out: the objects of FlashMLA's newest form.
        num_heads_per_head_k: query rows of one KV head, seq_len_q * num_heads_q // num_heads_k.
        num_heads_k: KV heads: 1.
        num_heads_q: query heads; not needed.
        is_fp8_kvcache, topk: the sparse decode's, refused.
        num_q_tokens_per_head_k: the second generation's name of ``num_heads_per_head_k``.

    Returns:
        (tile_scheduler_metadata, num_splits) on the lengths' device, in FlashMLA's shapes: i32 [parts, 8], zeros, and i32
        [batch_size + 1], the running count of one split a sequence.  They may be kept, sliced, copied and replayed; nothing
        reads them.  Without lengths (FlashMLASchedMeta, None).

    Raises:
        InvalidArgument: names the argument, what was wanted and what came.
        Unsupported: the sparse decode, or more than one KV head.
    """
    _refuse_fp8(is_fp8_kvcache)
    _refuse_given(topk=topk)
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    check_type("cache_seqlens", cache_seqlens, torch.Tensor)
    expect(cache_seqlens, "cache_seqlens", (None,), (torch.int32,), None)
    rows = num_q_tokens_per_head_k if num_heads_per_head_k is None else num_heads_per_head_k
    row_tiles = -(-_count("num_heads_per_head_k", rows) // _TILE_ROWS)
    if _count("num_heads_k", num_heads_k) != 1:
        raise Unsupported("num_heads_k", "num_heads_k", "1: MLA caches one head", str(num_heads_k))
    device = cache_seqlens.device
    parts = max(1, Target.detect(device).compute_units // row_tiles)
    schedule = torch.zeros(parts, _SCHEDULE_FIELDS, dtype=torch.int32, device=device)
    return schedule, torch.arange(cache_seqlens.shape[0] + 1, dtype=torch.int32, device=device)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | FlashMLASchedMeta | None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense paged MLA decode; the bits of ``out`` and ``lse`` are those of ``pagedmla.decode``.

    Args:
        q: [batch_size, seq_len_q, num_heads_q, head_dim] bf16, fp16 or fp32; copied where the first two axes do not lie as one.
        k_cache: [num_pages, page_size, 1, head_dim] of q's dtype, any strides with inner stride 1.
        block_table: i32 [batch_size, max_pages]; cells past a sequence's end may hold anything.
        cache_seqlens: i32 [batch_size], tokens, this step's included; 0 is legal.
        head_dim_v: the latent's share of head_dim (512 of 576).
        tile_scheduler_metadata, num_splits: from ``get_mla_metadata``, of any batch; not read.
        softmax_scale: left out, ``head_dim ** -0.5``, which is hardly ever the model's: see the module.
        causal: query j of n sees keys 0 .. length - n + j; by default every query sees every key.
        the others: the sparse decode's; refused unless left at their defaults.

    Returns:
        out [batch_size, seq_len_q, num_heads_q, head_dim_v] of q's dtype and lse f32 [batch_size, num_heads_q, seq_len_q],
        natural logarithm; both contiguous.  A row that sees no key has out 0 and lse -inf.

    Raises:
        InvalidArgument: names the argument, what was wanted and what came.
        Unsupported: what is not dense decode, or refused by every backend.
    """
    _refuse_fp8(is_fp8_kvcache)
    _refuse_given(
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    _check_metadata("tile_scheduler_metadata", tile_scheduler_metadata)
    _check_metadata("num_splits", num_splits)
    _check_tensors(q, k_cache, block_table, cache_seqlens)
    head_dim_v = _count("head_dim_v", head_dim_v, most=q.shape[3])
    batch_size, seq_len_q, num_heads, head_dim = q.shape
    out, lse = decode(
        q.flatten(0, 1),
        k_cache.squeeze(2),
        block_table,
        cache_seqlens,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        kv_lora_rank=head_dim_v,
    )
    # with one query token the transposed view is contiguous already, and nothing is copied
    lse = lse.view(batch_size, seq_len_q, num_heads).transpose(1, 2).contiguous()
    return out.view(batch_size, seq_len_q, num_heads, head_dim_v), lse


def _check_tensors(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
) -> None:
    """Ranks, shapes, dtypes and devices, in the words of this signature."""
    for name, tensor in (("q", q), ("k_cache", k_cache)):
        check_type(name, tensor, torch.Tensor)
        if tensor.dtype.itemsize == 1:
            wanted = "16 or 32 bits; pagedmla.decode takes fp8, with its scales"
            raise Unsupported("dtype", name, wanted, str(tensor.dtype))
    check_type("block_table", block_table, torch.Tensor)
    check_type("cache_seqlens", cache_seqlens, torch.Tensor)
    expect(q, "q", (None, None, None, None), _DTYPES, None, inner_stride=True)
    if k_cache.dim() == 4 and k_cache.shape[2] > 1:
        got = str(list(k_cache.shape))
        raise Unsupported("num_heads_k", "k_cache", "one KV head: [num_pages, page_size, 1, head_dim]", got)
    expect(k_cache, "k_cache", (None, None, 1, q.shape[3]), (q.dtype,), q.device, inner_stride=True)
    expect(block_table, "block_table", (q.shape[0], None), (torch.int32,), q.device)
    expect(cache_seqlens, "cache_seqlens", (q.shape[0],), (torch.int32,), q.device)


def _check_metadata(name: str, value: object) -> None:
    if value is None or (isinstance(value, torch.Tensor) and value.dtype == torch.int32):
        return
    if name == "num_splits" or not isinstance(value, FlashMLASchedMeta):
        got = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InvalidArgument("metadata", name, "what get_mla_metadata of this module returned", got)


def _count(name: str, value: object, most: int | None = None) -> int:
    """A whole number, numpy's included; no tensor, which would have to be read."""
    wanted = "a whole number >= 1" if most is None else f"a whole number in 1..{most}"
    if not isinstance(value, (bool, torch.Tensor)) and hasattr(value, "__index__"):
        number = operator.index(value)
        if 1 <= number <= (most or number):
            return number
    raise InvalidArgument(name, name, wanted, repr(value))


def _refuse_fp8(is_fp8_kvcache: object) -> None:
    if is_fp8_kvcache:
        wanted = "False: FlashMLA's fp8 cache belongs to its sparse decode"
        raise Unsupported("is_fp8_kvcache", "is_fp8_kvcache", wanted, repr(is_fp8_kvcache))


def _refuse_given(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise Unsupported("sparse", name, "None: dense decode alone is here", type(value).__name__)
