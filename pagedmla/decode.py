"""``decode`` for one call, ``DecodePlan`` for engines, ``merge_states`` for whoever cut the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagedmla.contract.arguments import Scale, check_scale_number, expect
from pagedmla.contract.errors import InvalidArgument, Unsupported, check_type
from pagedmla.contract.problem import (
    QUERY_DTYPES,
    BatchBounds,
    DecodeProblem,
    check_softmax_scale,
    out_dtype_of,
)
from pagedmla.contract.support import check_backend_name
from pagedmla.contract.target import Target
from pagedmla.dispatch import workspace_bytes
from pagedmla.kernels.repeat import MEMO, Call, identify, is_plain
from pagedmla.ops import call_of  # registers torch.ops.pagedmla, too

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def decode(
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    cu_seqlens_q: torch.Tensor | None = None,
    causal: bool = True,
    kv_lora_rank: int = 512,
    q_scale: Scale = None,
    kv_scale: Scale = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
    schedule: str | None = None,
    num_kv_splits: int | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    max_q_len: int | None = None,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Paged MLA decode attention with absorbed projections (DeepSeek-V2, section 2.1 and its appendix on absorption).

    score[t, h, j] = softmax_scale * <q[t, h], kv[j]>;  out[t, h] = sum_j softmax(score[t, h])[j] * kv[j, :kv_lora_rank].

    Args:
        q: [num_tokens, num_heads, head_dim_qk] bf16, fp16, fp32 or fp8, all sequences' tokens packed; or the pair
            (q_nope [num_tokens, num_heads, kv_lora_rank], q_pe [num_tokens, num_heads, qk_rope_head_dim]).
        kv_cache: [num_pages, page_size, head_dim_qk], latent first, then rope; any strides with inner stride 1.
        block_table: i32 [num_seqs, max_pages]; cells past a sequence's end may hold anything.
        seq_lens: i32 [num_seqs], keys of each sequence in tokens, this step's included; 0 is legal.
        softmax_scale: from the head size before absorption, with YaRN's factor; it has no default.
        cu_seqlens_q: i32 [num_seqs + 1], where each sequence's query tokens start; left out: the same number for all.
        causal: query j of n sees keys 0 .. seq_len - n + j; otherwise every query sees every key.
        kv_lora_rank: how much of a token is its latent, which is also its value.
        q_scale, kv_scale: fp8 only, float or f32 tensor of one element, multiplied on read.
        out: [num_tokens, num_heads, kv_lora_rank] of q's dtype (bf16 for fp8 q) to write into; may be a strided view.
        lse: f32 [num_tokens, num_heads] to write into.
        backend, schedule, num_kv_splits: None lets the support table choose; a value is taken, or refused with the reason.
        batch_invariant: a row's bits do not depend on the other rows of the call.
        workspace: uint8 [at least workspace_size(...)] for intermediates.
        max_q_len: with cu_seqlens_q, the most query tokens of one sequence, where the caller knows: a kernel made for so many
            may run.  A sequence that has more on the device than was said gets unspecified rows.
        validate: read the device's values and report the first one out of range; for debugging, it waits for the device.

    Returns:
        (out, lse): lse is the natural logarithm.  A row that sees no key has out 0 and lse -inf.

    Raises:
        InvalidArgument: the caller's mistake; names the argument, what was wanted and what came.
        Unsupported: valid, but refused by the backend (all of them, when none was named).
    """
    call = None
    # a call that was made before goes the short way, unless somebody wants to see an operator
    if validate is False and not torch.compiler.is_compiling() and is_plain():
        latent: Any
        latent, rotated = q if type(q) is tuple and len(q) == 2 else (q, None)
        q_number, q_tensor = (None, q_scale) if isinstance(q_scale, torch.Tensor) else (q_scale, None)
        kv_number, kv_tensor = (None, kv_scale) if isinstance(kv_scale, torch.Tensor) else (kv_scale, None)
        # as ops.call_of does, before anything is checked: a wrong call is like none that was made
        call = identify(
            (
                latent, rotated, kv_cache, out, lse,
                block_table, seq_lens, cu_seqlens_q, q_tensor, kv_tensor, workspace,
            ),
            (
                softmax_scale, causal, kv_lora_rank, q_number, kv_number,
                backend, schedule, num_kv_splits, batch_invariant, max_q_len,
            ),
        )  # fmt: skip
        if call is not None and (made := MEMO.again(call, out, lse)) is not None:
            return made
    q_latent, q_pe = _split_query(q)
    _check_kinds(kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens)
    _check_kinds(optional=True, cu_seqlens_q=cu_seqlens_q, out=out, lse=lse, workspace=workspace)
    _refuse_training(q=q_latent, q_pe=q_pe, kv_cache=kv_cache, out=out, lse=lse)
    _refuse_training(q_scale=_tensor_or_none(q_scale), kv_scale=_tensor_or_none(kv_scale))
    given = (
        q_latent,
        q_pe,
        kv_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        check_softmax_scale(softmax_scale),
        _flag("causal", causal),
        _count("kv_lora_rank", kv_lora_rank),
        *_split_scale("q_scale", q_scale),
        *_split_scale("kv_scale", kv_scale),
        _backend_name(backend),
        _word("schedule", schedule),
        None if num_kv_splits is None else _count("num_kv_splits", num_kv_splits),
        _flag("batch_invariant", batch_invariant),
        workspace,
        None if max_q_len is None else _count("max_q_len", max_q_len),
        _flag("validate", validate),
    )
    if out is None and lse is None:
        made = torch.ops.pagedmla.decode(*given)
        _remember(call, given, None, None)
        return made
    expect(q_latent, "q", (None, None, None), QUERY_DTYPES, None)
    rows = (q_latent.shape[0], q_latent.shape[1])
    if kv_lora_rank > q_latent.shape[2]:
        raise InvalidArgument(
            "head_dim", "q", f"at least kv_lora_rank = {kv_lora_rank} wide", str(list(q_latent.shape))
        )
    if out is None:
        out = torch.empty((*rows, kv_lora_rank), dtype=out_dtype_of(q_latent.dtype), device=q_latent.device)
    if lse is None:
        lse = torch.empty(rows, dtype=torch.float32, device=q_latent.device)
    torch.ops.pagedmla.decode_out(*given, out, lse)
    _remember(call, given, out, lse)
    return out, lse


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of disjoint sets of keys: split-KV, chunked prefix, cascade, context parallel.

    Args:
        outs: states of [num_tokens, num_heads, dv], or stacked [states, num_tokens, num_heads, dv].
        lses: states of f32 [num_tokens, num_heads], or stacked; natural logarithm.

    Returns:
        out of outs' dtype and lse.  A state without keys, (anything, -inf), is the identity, bit for bit; only such states
        give (0, -inf); a NaN in a state that has keys stays visible.  lse +inf, which some kernels write for an empty row,
        counts as -inf.  States are merged in the order given.

    Raises:
        InvalidArgument: no states, numbers of states that differ, or wrong ranks, shapes, dtypes, devices.
    """
    states, state_lses = _states("outs", outs, 4), _states("lses", lses, 3)
    for state, lse in zip(states, state_lses, strict=False):
        _refuse_training(outs=state, lses=lse)
    return torch.ops.pagedmla.merge_states(states, state_lses)


def workspace_size(
    problem: DecodeProblem,
    bounds: BatchBounds,
    device: torch.device | str = "cpu",
    backend: str | None = None,
) -> int:
    """Bytes of ``workspace`` for every call of ``problem`` within ``bounds``.

    Raises:
        Unsupported: the problem is refused.
    """
    check_type("problem", problem, DecodeProblem)
    check_type("bounds", bounds, BatchBounds)
    return workspace_bytes(problem, bounds, Target.detect(device), backend)


def _remember(
    call: Call | None, given: tuple[Any, ...], out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """Lets the call as it was given lead to what the operator remembers, whose numbers are of the schema's types."""
    if call is not None and (same := call_of(given, out, lse)) is not None:
        MEMO.also(call, same)


def _split_query(q: Query) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(q, torch.Tensor):
        return q, None
    if isinstance(q, (tuple, list)) and len(q) == 2 and all(isinstance(part, torch.Tensor) for part in q):
        return q[0], q[1]
    raise InvalidArgument("type", "q", "a tensor, or the pair (q_nope, q_pe)", _kind(q))


def _split_scale(name: str, scale: Scale) -> tuple[float | None, torch.Tensor | None]:
    if scale is None or isinstance(scale, torch.Tensor):
        return None, scale
    return check_scale_number(name, scale), None


def _check_kinds(optional: bool = False, **tensors: object) -> None:
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) and not (optional and value is None):
            raise InvalidArgument("type", name, "a tensor or None" if optional else "a tensor", _kind(value))


def _refuse_training(**tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                wanted = "inference: no gradient is defined; use torch.no_grad()"
                raise Unsupported("training", name, wanted, "requires_grad=True")


def _tensor_or_none(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument("type", name, "a bool", _kind(value))
    return value


def _count(name: str, value: object) -> int:
    # schemas hold 64-bit integers
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise InvalidArgument(name, name, "a whole number >= 1", repr(value))
    return value


def _word(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidArgument("type", name, "a name or None", _kind(value))
    return value


def _backend_name(backend: object) -> str | None:
    check_backend_name(backend)
    return _word("backend", backend)


def _kind(value: object) -> str:
    return f"{type(value).__name__}"


def _states(
    name: str, states: torch.Tensor | Sequence[torch.Tensor], stacked_rank: int
) -> list[torch.Tensor]:
    if isinstance(states, torch.Tensor):
        expect(states, name, (None,) * stacked_rank, (states.dtype,), None)
        return list(states.unbind(0))
    if not isinstance(states, (tuple, list)) or not all(isinstance(state, torch.Tensor) for state in states):
        raise InvalidArgument("type", name, "a stacked tensor, or a sequence of tensors", _kind(states))
    return list(states)
