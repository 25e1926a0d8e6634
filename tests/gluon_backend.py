"""The Gluon backend for value tests, which only a Hopper card can run; a failure says where the wrong numbers are."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import batches
import pytest
import torch
from batches import Batch
from torch import Tensor

import pagedmla
from pagedmla.conformance import numerics
from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import BatchBounds, DecodeProblem

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs an NVIDIA Hopper GPU")
DEVICE = torch.device("cuda" if ON_HOPPER else "cpu")
DTYPES = (torch.bfloat16, torch.float16)
RANK, ROPE = 512, 64
TILE, PAIR = 64, 128
"""Tokens of a KV tile, and of the two that the kernel for many rows computes at a time."""

EVEN: dict[str, Any] = {"cu_seqlens_q": None}
"""Makes a call of alike numbers of query tokens one without query starts."""


def make_batch(*arguments: Any, **options: Any) -> Batch:
    """``batches.make_batch`` of what the backend takes: 512 + 64 numbers, bf16, 32 heads unless told."""
    return batches.make_batch(
        *arguments, **{"num_heads": 32, "dims": (RANK, ROPE), "q_dtype": torch.bfloat16} | options
    )


def arguments(batch: Batch, page_size: int = 64, **layout: Any) -> dict[str, Any]:
    """``batches.arguments`` on this device."""
    return batches.arguments(batch, page_size, **{"device": DEVICE} | layout)


def run(call: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """``batches.run`` by the Gluon backend."""
    return batches.run(call, **{"backend": "gluon"} | options)


def check(result: tuple[Tensor, Tensor], call: dict[str, Any]) -> None:
    """Asserts that a result is within the derived bound of the oracle: weights are rounded to the cache's dtype."""
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in call.items()}
    if isinstance(call["q"], tuple):
        on_cpu["q"] = tuple(part.cpu() for part in call["q"])
    expected = batches.expect(on_cpu, p_dtype=call["kv_cache"].dtype)
    comparison = numerics.compare(*result, expected)
    assert comparison.passed, f"{comparison.detail}; {_wrong(result, expected, on_cpu)}"


def checked(call: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """Runs a call and checks its values; ``options`` that change what is computed belong into ``call``."""
    result = run(call, **options)
    check(result, call)
    return result


def _wrong(result: tuple[Tensor, Tensor], expected: numerics.Expected, call: dict[str, Any]) -> str:
    """Which sequences have wrong rows, and in which half of the values, which a warpgroup each computes."""
    out, lse = (part.cpu().double() for part in result)
    wrong = ~((out - expected.out).abs() <= expected.bound)
    lse_off = (lse - expected.lse).abs()
    wrong_lse = ~((lse == expected.lse) | (lse_off <= 1e-5 + 1e-5 * expected.lse.abs()))
    lens = call["seq_lens"].tolist()
    starts = query_starts(call)
    lines = []
    for sequence, (first, end) in enumerate(pairwise(starts)):
        rows = slice(first, end)
        counts = [int(part.any(-1).sum()) for part in (wrong[rows, :, :256], wrong[rows, :, 256:])]
        counts.append(int(wrong_lse[rows].sum()))
        if any(counts):
            total = (end - first) * out.shape[1]
            lines.append(
                f"sequence {sequence} ({end - first} queries, {lens[sequence]} keys): wrong in the left half {counts[0]},"
                f" right half {counts[1]}, lse {counts[2]} of {total} rows"
            )
    return "; ".join(lines[:6]) or "rows of no sequence"


def query_starts(call: dict[str, Any]) -> list[int]:
    """Where each sequence's query tokens start, and the last one's end."""
    if call.get("cu_seqlens_q") is not None:
        return call["cu_seqlens_q"].tolist()
    count = len(call["seq_lens"])
    first = call["q"][0] if isinstance(call["q"], tuple) else call["q"]
    return list(accumulate([len(first) // count] * count, initial=0))


def rows_of(result: tuple[Tensor, Tensor], rows: Any) -> tuple[Tensor, ...]:
    """Some rows of (out, lse)."""
    return tuple(part[rows] for part in result)


def is_zero(result: tuple[Tensor, ...]) -> bool:
    """Whether rows are exactly what a row without keys gets: plus zeros and -inf."""
    out, lse = result
    return bool((out == 0).all() & ~torch.signbit(out).any() & (lse == -torch.inf).all())


def problem_of(call: dict[str, Any], max_q_len: int, **mode: Any) -> tuple[DecodeProblem, BatchBounds]:
    """The static half of a call, and bounds that it just fits."""
    q, cache = call["q"], call["kv_cache"]
    first = q[0] if isinstance(q, tuple) else q
    problem = DecodeProblem(
        num_heads=first.shape[1],
        softmax_scale=call["softmax_scale"],
        page_size=cache.shape[1],
        q_dtype=first.dtype,
        kv_layout=layout_of_dtype(cache.dtype).name,
        max_q_len=max_q_len,
        **mode,
    )
    return problem, BatchBounds(call["seq_lens"].shape[0], call["block_table"].shape[1], first.shape[0])


def args_of(call: dict[str, Any], **changes: Any) -> DecodeArguments:
    """What the operators make of a call."""
    given = {name: value for name, value in call.items() if name not in ("q_scale", "kv_scale")} | changes
    q, q_pe = given.pop("q") if isinstance(given["q"], tuple) else (given.pop("q"), None)
    return DecodeArguments(q=q, q_pe=q_pe, **given)


def heads_first(tensor: Tensor) -> Tensor:
    """The same numbers, with the heads outside of the tokens in memory, as a batched projection leaves them."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def workspace_of(call: dict[str, Any], byte: int = 0xFF) -> Tensor:
    """A workspace for any spread of the call's query tokens, full of one byte."""
    size = pagedmla.workspace_size(*problem_of(call, len(args_of(call).q)), DEVICE)
    return torch.full((size,), byte, dtype=torch.uint8, device=DEVICE)
