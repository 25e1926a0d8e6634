"""``torch.ops.pagedmla.*``: the schemas, their fake implementations, and what stands behind them.

    decode(q, q_pe?, kv_cache, block_table, seq_lens, cu_seqlens_q?, softmax_scale, ...) -> (out, lse)
    decode_out(the same, out, lse) -> ()          writes into out and lse
    merge_states(outs, lses) -> (out, lse)        lists of states

A scale is given as a float or as a tensor, never both; a schema has no unions, hence two arguments each.  The implementations
take the schema's arguments by position, in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagedmla import kernels
from pagedmla.contract.arguments import DecodeArguments, check_arguments, expect
from pagedmla.contract.errors import InvalidArgument
from pagedmla.contract.memory import check_memory
from pagedmla.contract.problem import out_dtype_of
from pagedmla.contract.slots import tensors_of
from pagedmla.contract.support import check_backend_name
from pagedmla.contract.target import Target
from pagedmla.contract.values import check_values
from pagedmla.dispatch import backend_for
from pagedmla.kernels.repeat import MEMO, Call, identify
from pagedmla.paging import device_kernels

_DECODE_ARGUMENTS = (
    "Tensor q, Tensor? q_pe, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q, "
    "float softmax_scale, bool causal, int kv_lora_rank, float? q_scale, Tensor? q_scale_tensor, float? kv_scale, "
    "Tensor? kv_scale_tensor, str? backend, str? schedule, int? num_kv_splits, bool batch_invariant, "
    "Tensor(w!)? workspace, int? max_q_len, bool validate"
)

_library = torch.library.Library("pagedmla", "DEF")
_library.define(f"decode({_DECODE_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(f"decode_out({_DECODE_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse) -> ()")
_library.define("merge_states(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)")


def _arguments(
    q: torch.Tensor,
    q_pe: torch.Tensor | None,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    kv_lora_rank: int,
    q_scale: float | None,
    q_scale_tensor: torch.Tensor | None,
    kv_scale: float | None,
    kv_scale_tensor: torch.Tensor | None,
    backend: str | None,
    schedule: str | None,
    num_kv_splits: int | None,
    batch_invariant: bool,
    workspace: torch.Tensor | None,
    max_q_len: int | None,
    validate: bool,
) -> tuple[DecodeArguments, str | None, bool]:
    args = DecodeArguments(
        q=q,
        q_pe=q_pe,
        kv_cache=kv_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        softmax_scale=softmax_scale,
        causal=causal,
        kv_lora_rank=kv_lora_rank,
        q_scale=q_scale if q_scale_tensor is None else q_scale_tensor,
        kv_scale=kv_scale if kv_scale_tensor is None else kv_scale_tensor,
        schedule=schedule,
        num_kv_splits=num_kv_splits,
        batch_invariant=batch_invariant,
        workspace=workspace,
        max_q_len=max_q_len,
    )
    return args, backend, validate


def _empty_outputs(args: DecodeArguments) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (args.num_tokens, args.num_heads)
    out = torch.empty((*rows, args.kv_lora_rank), dtype=out_dtype_of(args.q.dtype), device=args.q.device)
    return out, torch.empty(rows, dtype=torch.float32, device=args.q.device)


def call_of(
    given: Sequence[Any], out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> Call | None:
    """What tells a call from others, or None where it is not to be remembered.

    Args:
        given: the schema's arguments, without the outputs.
        out, lse: those that were given.
    """
    q, q_pe, kv_cache, block_table, seq_lens, cu_seqlens_q, *middle, workspace, max_q_len, validate = given
    softmax_scale, causal, kv_lora_rank, q_scale, q_scale_tensor, kv_scale, kv_scale_tensor, *choices = middle
    if validate:
        return None
    return identify(
        (
            q, q_pe, kv_cache, out, lse,
            block_table, seq_lens, cu_seqlens_q, q_scale_tensor, kv_scale_tensor, workspace,
        ),
        (softmax_scale, causal, kv_lora_rank, q_scale, kv_scale, *choices, max_q_len),
    )  # fmt: skip


def _run(
    args: DecodeArguments,
    backend: str | None,
    validate: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call | None,
) -> None:
    problem = args.problem()
    name = backend_for(args, problem, Target.detect(args.q.device), backend)
    check_memory(args, out, lse)
    if validate:
        check_values(args)
    work = kernels.load(name).decode(args, problem, out, lse)
    if work is not None and call is not None:
        MEMO.remember(call, work, tensors_of(args, out, lse))


def _decode(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = call_of(given)
    if call is not None and (made := MEMO.again(call, None, None)) is not None:
        return made
    args, backend, validate = _arguments(*given)
    check_arguments(args)
    out, lse = _empty_outputs(args)
    _run(args, backend, validate, out, lse, call)
    return out, lse


def _decode_out(*given: Any) -> None:
    *inputs, out, lse = given
    call = call_of(inputs, out, lse)
    if call is not None and MEMO.again(call, out, lse) is not None:
        return
    args, backend, validate = _arguments(*inputs)
    check_arguments(args, out, lse)
    _run(args, backend, validate, out, lse, call)


def _decode_fake(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    args, backend, _ = _arguments(*given)
    check_backend_name(backend)
    check_arguments(args)
    return _empty_outputs(args)


def _decode_out_fake(*given: Any) -> None:
    *inputs, out, lse = given
    args, backend, _ = _arguments(*inputs)
    check_backend_name(backend)
    check_arguments(args, out, lse)


def check_states(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> None:
    """Raises InvalidArgument unless there are as many outs [num_tokens, num_heads, dv] as lses [num_tokens, num_heads], all
    alike."""
    if not outs:
        raise InvalidArgument("num_states", "outs", "at least one state", "none")
    if len(lses) != len(outs):
        raise InvalidArgument("num_states", "lses", f"{len(outs)} states, as outs", str(len(lses)))
    first = outs[0]
    expect(
        first, "outs", (None, None, None), (torch.bfloat16, torch.float16, torch.float32, torch.float64), None
    )
    lse_dtype = (
        torch.float64 if first.dtype == torch.float64 and lses[0].dtype == torch.float64 else torch.float32
    )
    for out, lse in zip(outs, lses, strict=True):
        expect(out, "outs", (first.shape[0], first.shape[1], first.shape[2]), (first.dtype,), first.device)
        expect(lse, "lses", (first.shape[0], first.shape[1]), (lse_dtype,), first.device)


def _merge_states(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    check_states(outs, lses)
    dtype, device = outs[0].dtype, outs[0].device
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if accumulator == torch.float32 and device_kernels.kernels_for(device) is not None:
            # one launch; the states are read in their own dtype
            return kernels.load_merging("triton").merge_states(outs, lses)
        # plain tensor arithmetic, which every device has
        out, lse = kernels.load_merging("torch").merge_states(
            [out.to(accumulator) for out in outs], [lse.to(accumulator) for lse in lses]
        )
    return out.to(dtype), lse.to(lses[0].dtype)


def _merge_states_fake(
    outs: list[torch.Tensor], lses: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    check_states(outs, lses)
    shape = outs[0].shape
    return outs[0].new_empty(shape), lses[0].new_empty(shape[:-1])


for _name, _implementation, _fake in (
    ("decode", _decode, _decode_fake),
    ("decode_out", _decode_out, _decode_out_fake),
    ("merge_states", _merge_states, _merge_states_fake),
):
    # one implementation for every device: the backend is chosen inside, by the support table
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pagedmla::{_name}", _fake, lib=_library)
