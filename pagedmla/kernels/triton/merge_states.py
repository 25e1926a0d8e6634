"""The union of softmax states over disjoint sets of keys: one launch for any number of states.

One program a (token, head) row.  Logarithms are read three times (largest, sum, shares): a row has one a state, while its
values, hundreds of numbers, are read once, and those of a state without keys never.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pagedmla.kernels.triton.append import to_dtype

_MAX_BLOCK = 512
_F32_MIN = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _log(pointer):
    """A state's log-sum-exp.  No sum of exponentials is infinite: +inf can only be another kernel's word for no keys."""
    value = tl.load(pointer)
    return tl.where(value == float("inf"), -float("inf"), value)


@triton.jit
def _add_state(acc, started, lse, shift, total, values, column, dv):
    has_keys = lse != -float("inf")
    share = tl.div_rn(tl.exp(lse - shift), total)
    # of a state without keys nothing is read
    num_columns = tl.where(has_keys, dv, 0)
    part = to_dtype(tl.load(values, mask=column < num_columns, other=0.0), tl.float32) * share
    # the first part is taken as it is: added to 0, it would lose the sign of its zeros
    grown = tl.where(started, acc + part, part)
    return tl.where(has_keys, grown, acc), started | has_keys


@triton.jit(
    do_not_specialize=(
        "num_heads",
        "num_others",
        "lse_token_stride",
        "lse_head_stride",
        "others_lse_state_stride",
        "others_lse_token_stride",
        "others_lse_head_stride",
    )
)
def merge_states_kernel(
    first_out,
    first_lse,
    others_out,
    others_lse,
    out,
    lse,
    num_heads,
    num_others,
    dv,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    out_stride: tl.int64,
    lse_token_stride: tl.int64,
    lse_head_stride: tl.int64,
    others_out_state_stride: tl.int64,
    others_out_token_stride: tl.int64,
    others_out_head_stride: tl.int64,
    others_out_stride: tl.int64,
    others_lse_state_stride: tl.int64,
    others_lse_token_stride: tl.int64,
    others_lse_head_stride: tl.int64,
    BLOCK: tl.constexpr,
):
    """Grid (num_tokens * num_heads, blocks).  Strides without a prefix are the first state's; out and lse are contiguous.

    A program takes every ``blocks``-th block of its row's dv numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    head = row % num_heads
    first_out += token * out_token_stride + head * out_head_stride
    first_lse += token * lse_token_stride + head * lse_head_stride
    others_out += token * others_out_token_stride + head * others_out_head_stride
    others_lse += token * others_lse_token_stride + head * others_lse_head_stride

    # all states may be empty: shifting by a finite number keeps exp() away from inf - inf.  A nan that the maximum drops
    # comes back through the sum.
    lse_of_first = _log(first_lse)
    shift = tl.maximum(lse_of_first, _F32_MIN)
    log = others_lse
    state = 0
    while state < num_others:
        shift = tl.maximum(shift, _log(log))
        log += others_lse_state_stride
        state += 1
    total = tl.exp(lse_of_first - shift)
    log = others_lse
    state = 0
    while state < num_others:
        total += tl.exp(_log(log) - shift)
        log += others_lse_state_stride
        state += 1
    divisor = tl.where(total == 0.0, 1.0, total)

    first_column = tl.program_id(1) * BLOCK
    while first_column < dv:
        column = first_column + tl.arange(0, BLOCK)
        acc = tl.zeros([BLOCK], tl.float32)
        values = first_out + column.to(tl.int64) * out_stride
        acc, started = _add_state(acc, False, lse_of_first, shift, divisor, values, column, dv)
        log = others_lse
        values = others_out + column.to(tl.int64) * others_out_stride
        state = 0
        while state < num_others:
            acc, started = _add_state(acc, started, _log(log), shift, divisor, values, column, dv)
            log += others_lse_state_stride
            values += others_out_state_stride
            state += 1
        tl.store(out + row * dv + column, to_dtype(acc, out.dtype.element_ty), mask=column < dv)
        first_column += tl.num_programs(1) * BLOCK
    if tl.program_id(1) == 0:
        # log 1 = 0: spelt out, since adding 0 loses the sign of a zero
        merged = tl.where(total == 1.0, shift, shift + tl.log(divisor))
        tl.store(lse + row, tl.where(total == 0.0, -float("inf"), merged))


def merge_states(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges states in the order given: lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse) out_i, in float32.

    One or two states, and any number that are slices of one stacked tensor, are read where they are; of more the second and
    later ones are stacked first.  The same bits every time.

    Args:
        outs: bf16, fp16 or f32 [num_tokens, num_heads, dv] each, all of one dtype, any strides, at least one.
        lses: f32 [num_tokens, num_heads] each, any strides; natural logarithm.

    Returns:
        out [num_tokens, num_heads, dv] of outs' dtype and lse f32 [num_tokens, num_heads].  A state without keys (lse -inf,
        or +inf as some kernels write it) is the identity, bit for bit, whatever its ``out`` holds; without any other,
        (0, -inf).  A NaN in a state with keys stays visible.
    """
    num_tokens, num_heads, dv = outs[0].shape
    out = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
    lse = torch.empty(lses[0].shape, dtype=torch.float32, device=lses[0].device)
    if lse.numel() == 0:
        return out, lse
    others_out, others_lse = (_stacked(states[1:] or states) for states in (outs, lses))
    with torch.cuda.device_of(out):
        merge_states_kernel[(num_tokens * num_heads, _blocks_of(dv))](
            outs[0],
            lses[0],
            others_out,
            others_lse,
            out,
            lse,
            num_heads,
            len(outs) - 1,
            dv,
            *outs[0].stride(),
            *lses[0].stride(),
            *others_out.stride(),
            *others_lse.stride(),
            BLOCK=min(_MAX_BLOCK, max(16, triton.next_power_of_2(dv))),
            num_warps=2,
        )
    return out, lse


def _blocks_of(dv: int) -> int:
    """Programs that share a row; 64 are far more than any model's head has use for."""
    return max(1, min(64, triton.cdiv(dv, _MAX_BLOCK)))


def _stacked(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """The states as one tensor with a dimension in front: a view where they are the slices of one, else a copy."""
    first = states[0]
    if len(states) == 1:
        return first.unsqueeze(0)
    step = states[1].storage_offset() - first.storage_offset()
    if step >= 0 and all(
        state.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and state.storage_offset() == first.storage_offset() + number * step
        and state.stride() == first.stride()
        for number, state in enumerate(states)
    ):
        return first.as_strided((len(states), *first.shape), (step, *first.stride()))
    return torch.stack(list(states))
