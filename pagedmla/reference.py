"""The oracle: paged MLA decode in float64, slow and plain on purpose, sharing no code with any kernel.

Two derivations that check each other:

* ``decode``: the absorbed form over the pages.  DeepSeek-V2 (arXiv 2405.04434), section 2.1, with the
  up-projections folded into query and output: multi-query attention, whose one key is the whole cached row
  and whose value is the row's first ``kv_lora_rank`` numbers.
* ``multi_head``: ordinary multi-head attention with keys and values decompressed from the latent, as that
  section writes it.  ``absorb_query`` and ``up_project`` lead from one to the other.

Inputs are taken as they are stored (rounded once, to their dtype) and promoted.  Nothing past a sequence's
end is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.kv_layout import layout_of_dtype

Query = Tensor | tuple[Tensor, Tensor]
Scale = float | Tensor | None


def float8_table(dtype: torch.dtype) -> Tensor:
    """The value of each of the 256 codes of an 8-bit float, f64 [256], from the format's definition.

    e4m3fn (OCP 8-bit floating point specification): sign, 4 exponent bits of bias 7, 3 mantissa bits; only
    S.1111.111 is NaN, no infinity.  e4m3fnuz (arXiv 2206.02915): bias 8; the code of minus zero, 0x80, is the
    only NaN.

    Raises:
        InvalidArgument: another dtype.
    """
    biases = {torch.float8_e4m3fn: 7, torch.float8_e4m3fnuz: 8}
    if dtype not in biases:
        raise InvalidArgument("dtype", "dtype", "float8_e4m3fn or float8_e4m3fnuz", str(dtype))
    bias, values = biases[dtype], []
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        # exponent 0 is subnormal: no leading one, and the exponent of 1
        magnitude = ((exponent > 0) + mantissa / 8) * 2.0 ** (max(exponent, 1) - bias)
        is_nan = code == 0x80 if dtype == torch.float8_e4m3fnuz else code & 0x7F == 0x7F
        values.append(float("nan") if is_nan else -magnitude if sign else magnitude)
    return torch.tensor(values, dtype=torch.float64)


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Folds the key up-projection into the query.

    Args:
        q_nope: [T, H, qk_nope_head_dim], queries without position.
        w_uk: [H, qk_nope_head_dim, kv_lora_rank], key up-projection of each head.

    Returns:
        f64 [T, H, kv_lora_rank]: ``<q, W_UK c> = <W_UK^T q, c>``.
    """
    return torch.einsum("thn,hnr->thr", q_nope.double(), w_uk.double())


def up_project(out: Tensor, w_uv: Tensor) -> Tensor:
    """Expands attention over latents to each head's value space.

    Args:
        out: [T, H, kv_lora_rank], what ``decode`` returns.
        w_uv: [H, v_head_dim, kv_lora_rank], value up-projection of each head.

    Returns:
        f64 [T, H, v_head_dim]: ``sum_j p_j W_UV c_j = W_UV sum_j p_j c_j``.
    """
    return torch.einsum("thr,hvr->thv", out.double(), w_uv.double())


@dataclass(frozen=True)
class SequenceAttention:
    """The attention of one sequence, everything in float64 on the CPU.

    Attributes:
        sequence: its index in the batch.
        rows: its rows of the packed query tokens.
        queries: [n_q, H, head_dim_qk], scale multiplied in.
        keys: [n, head_dim_qk], the cached tokens in order, scale multiplied in; n is the sequence's length.
        values: [n, kv_lora_rank], the latent part of ``keys``.
        scores: [n_q, H, n], softmax_scale multiplied in; -inf where the mask hides the key.
        probabilities: [n_q, H, n]; all 0 for a row that sees no key.
        lse: [n_q, H], natural logarithm; -inf for a row that sees no key.
    """

    sequence: int
    rows: slice
    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor
    probabilities: Tensor
    lse: Tensor

    def out(self) -> Tensor:
        """f64 [n_q, H, kv_lora_rank]: the weighted sum of values.  A NaN or Inf in a key is nobody's but of the rows that see
        it: elsewhere its weight is 0, and 0 * NaN must not count."""
        finite = torch.isfinite(self.values)
        out = self.probabilities @ torch.where(finite, self.values, 0.0)
        for key in (~finite.all(-1)).nonzero().flatten().tolist():
            sees = self.scores[..., key] != float("-inf")
            out = torch.where(sees[..., None] & ~finite[key], float("nan"), out)
        return out


def attend(
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
) -> Iterator[SequenceAttention]:
    """Yields the attention of each sequence in turn; arguments as for ``decode``.

    Raises:
        InvalidArgument: shapes that do not fit, or device values that lead outside the tensors.
        Unsupported: a packed cache layout.
    """
    queries = _read_queries(q, q_scale)
    num_tokens, head_dim = queries.shape[0], queries.shape[2]
    _check_dims(head_dim, kv_cache, kv_lora_rank)
    starts = query_starts(num_tokens, seq_lens, cu_seqlens_q)
    for sequence, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        keys = _gather(kv_cache, block_table, sequence, length, kv_scale)
        scores = softmax_scale * (queries[rows] @ keys.T)
        if causal:
            scores = scores.masked_fill(_hidden(rows.stop - rows.start, length).unsqueeze(1), float("-inf"))
        probabilities, lse = _softmax(scores)
        yield SequenceAttention(
            sequence, rows, queries[rows], keys, keys[:, :kv_lora_rank], scores, probabilities, lse
        )


def decode(
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
    workspace: Tensor | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """``pagedmla.decode`` in float64: the same arguments, the same meaning.

    Args:
        q: [T, H, kv_lora_rank + rope], or the pair ([T, H, kv_lora_rank], [T, H, rope]); absorbed, packed.
        kv_cache: [num_pages, page_size, kv_lora_rank + rope], latent first.
        block_table: i32 [num_seqs, max_pages]; cells past a sequence's last page are not read.
        seq_lens: i32 [num_seqs], keys of each sequence in tokens, this step's included.
        softmax_scale: multiplies the scores.
        cu_seqlens_q: i32 [num_seqs + 1], first query row of each sequence; None: the same number for all.
        causal: query j of n sees keys 0 .. seq_len - n + j; otherwise all.
        kv_lora_rank: latent numbers of a cached token.
        q_scale: multiplied on reading q; f32.
        kv_scale: multiplied on reading kv_cache; f32.
        out: [T, H, kv_lora_rank], gets a copy of the result, rounded to its dtype.
        lse: [T, H], likewise.
        backend, schedule, num_kv_splits, batch_invariant, workspace, validate: change no value; not used.

    Returns:
        out f64 [T, H, kv_lora_rank] and lse f64 [T, H], natural logarithm, on q's device.  A row that sees no
        key or belongs to no sequence is exactly 0 with lse -inf.

    Raises:
        InvalidArgument: shapes that do not fit, or device values that lead outside the tensors.
        Unsupported: a packed cache layout.
    """
    del backend, schedule, num_kv_splits, batch_invariant, workspace, validate  # how, not what
    first = q[0] if isinstance(q, tuple) else q
    num_tokens, num_heads = first.shape[0], first.shape[1]
    result = torch.zeros(num_tokens, num_heads, kv_lora_rank, dtype=torch.float64)
    logs = torch.full((num_tokens, num_heads), float("-inf"), dtype=torch.float64)
    parts = attend(
        q,
        kv_cache,
        block_table,
        seq_lens,
        softmax_scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        kv_lora_rank=kv_lora_rank,
        q_scale=q_scale,
        kv_scale=kv_scale,
    )
    for part in parts:
        result[part.rows] = part.out()
        logs[part.rows] = part.lse
    for given, value in ((out, result), (lse, logs)):
        if given is not None:
            given.copy_(value)
    return result.to(first.device), logs.to(first.device)


def multi_head(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    softmax_scale: float,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    kv_scale: Scale = None,
) -> Tensor:
    """Ordinary multi-head attention over decompressed keys and values, as a model is trained.

    Args:
        q_nope: [T, H, qk_nope_head_dim], queries that are NOT absorbed.
        q_pe: [T, H, rope], rotated queries.
        kv_cache, block_table, seq_lens, cu_seqlens_q, causal, softmax_scale, kv_scale: as for ``decode``.
        w_uk: [H, qk_nope_head_dim, kv_lora_rank].
        w_uv: [H, v_head_dim, kv_lora_rank].

    Returns:
        f64 [T, H, v_head_dim] on the CPU, what ``up_project(decode(absorb_query(q_nope), q_pe))`` gives; 0
        where no key is seen.
    """
    rank = w_uk.shape[2]
    result = torch.zeros(*q_nope.shape[:2], w_uv.shape[1], dtype=torch.float64)
    starts = query_starts(q_nope.shape[0], seq_lens, cu_seqlens_q)
    for sequence, length in enumerate(seq_lens.tolist()):
        cached = _gather(kv_cache, block_table, sequence, length, kv_scale)
        latent, k_pe = cached[:, :rank], cached[:, rank:]
        for head in range(q_nope.shape[1]):
            keys = torch.cat([latent @ w_uk[head].double().T, k_pe], dim=1)
            values = latent @ w_uv[head].double().T
            first, last = starts[sequence], starts[sequence + 1]
            for row in range(first, last):
                seen = max(0, length - (last - 1 - row)) if causal else length
                if seen:
                    query = torch.cat([q_nope[row, head], q_pe[row, head]]).double()
                    weights = torch.softmax(softmax_scale * (keys[:seen] @ query), dim=0)
                    result[row, head] = weights @ values[:seen]
    return result


def query_starts(num_tokens: int, seq_lens: Tensor, cu_seqlens_q: Tensor | None) -> list[int]:
    """First query row of each sequence and, last, the end of the last one, as host integers.

    Raises:
        InvalidArgument: query starts that fall or lie outside 0 .. num_tokens, or rows that do not divide
            evenly where there are none.
    """
    num_seqs = seq_lens.shape[0]
    if cu_seqlens_q is None:
        q_len = num_tokens // num_seqs if num_seqs else 0
        if q_len * num_seqs != num_tokens:
            wanted = f"a multiple of {num_seqs} rows, or cu_seqlens_q"
            raise InvalidArgument("q_rows", "q", wanted, str(num_tokens))
        return [q_len * sequence for sequence in range(num_seqs + 1)]
    starts = [int(start) for start in cu_seqlens_q.tolist()]
    if len(starts) != num_seqs + 1 or starts != sorted(starts) or starts[0] < 0 or starts[-1] > num_tokens:
        wanted = f"{num_seqs + 1} starts that never fall, in 0..{num_tokens}"
        raise InvalidArgument("cu_seqlens_q", "cu_seqlens_q", wanted, str(starts))
    return starts


def _promote(stored: Tensor, scale: Scale, argument: str) -> Tensor:
    """Stored numbers as f64 on the CPU; the scale is a float32, as the contract has it."""
    if stored.dtype.itemsize > 1:
        if scale is not None:
            raise InvalidArgument(argument, argument, f"None for {stored.dtype}", f"{scale!r}")
        return stored.detach().cpu().double()
    values = float8_table(stored.dtype)[stored.view(torch.uint8).cpu().long()]
    return values if scale is None else values * torch.as_tensor(scale, dtype=torch.float32).double().item()


def _read_queries(q: Query, q_scale: Scale) -> Tensor:
    parts = q if isinstance(q, tuple) else (q,)
    return torch.cat([_promote(part, q_scale, "q_scale") for part in parts], dim=2)


def _check_dims(head_dim: int, kv_cache: Tensor, kv_lora_rank: int) -> None:
    if layout_of_dtype(kv_cache.dtype).packed_bytes_per_token is not None:
        raise Unsupported("kv_layout", "kv_cache", "a layout whose elements are numbers", str(kv_cache.dtype))
    if kv_cache.dim() != 3 or kv_cache.shape[2] != head_dim or not 1 <= kv_lora_rank <= head_dim:
        wanted = f"[num_pages, page_size, {head_dim}], as wide as q and at least kv_lora_rank={kv_lora_rank}"
        raise InvalidArgument("kv_cache", "kv_cache", wanted, str(tuple(kv_cache.shape)))


def _gather(kv_cache: Tensor, block_table: Tensor, sequence: int, length: int, kv_scale: Scale) -> Tensor:
    """The tokens of one sequence, f64 [length, head_dim_qk], one by one through the table."""
    num_pages, page_size, head_dim = kv_cache.shape
    if not 0 <= length <= block_table.shape[1] * page_size:
        wanted = f"0..{block_table.shape[1] * page_size}, what the table's width holds (sequence {sequence})"
        raise InvalidArgument("seq_lens", "seq_lens", wanted, str(length))
    # the owned cells alone, read once: a device would be waited for at every token otherwise
    pages = block_table[sequence, : -(-length // page_size)].tolist()
    tokens = []
    for token in range(length):
        page = pages[token // page_size]
        if not 0 <= page < num_pages:
            wanted = f"pages in 0..{num_pages - 1} (sequence {sequence})"
            raise InvalidArgument("block_table", "block_table", wanted, str(page))
        tokens.append(kv_cache[page, token % page_size])
    stored = torch.stack(tokens) if tokens else kv_cache.new_empty(0, head_dim)
    return _promote(stored, kv_scale, "kv_scale")


def _hidden(num_queries: int, length: int) -> Tensor:
    """bool [num_queries, length]: key i is hidden from query j when i > length - num_queries + j."""
    last_seen = length - num_queries + torch.arange(num_queries)
    return torch.arange(length).unsqueeze(0) > last_seen.unsqueeze(1)


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and log of the sum of exponentials over the last axis; all -inf gives zeros and -inf."""
    if scores.shape[-1] == 0:
        return scores, torch.full(scores.shape[:-1], float("-inf"), dtype=scores.dtype)
    largest = scores.amax(dim=-1, keepdim=True)
    seen = largest != float("-inf")
    weights = torch.exp(scores - torch.where(seen, largest, torch.zeros_like(largest)))
    total = weights.sum(dim=-1, keepdim=True)
    probabilities = weights / torch.where(seen, total, torch.ones_like(total))
    return probabilities, (largest + torch.log(total)).squeeze(-1)
