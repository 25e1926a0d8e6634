"""A backend in the place of all others, which says with which addresses it is launched when a call is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla import kernels
from pagedmla.contract.slots import SLOTS
from pagedmla.kernels.repeat import MEMO

RANK, ROPE, HEADS, PAGE, TOKENS = 32, 8, 3, 4, 5
WORKSPACE_BYTES = 100


class StandIn:
    """A backend, and what it says can be repeated."""

    workspace_bytes = WORKSPACE_BYTES

    def __init__(self) -> None:
        self.decoded = 0
        self.launched: list[Sequence[int]] = []
        self.is_ready = True
        self.repeats = True

    def decode(self, args: Any, problem: Any, out: Tensor, lse: Tensor) -> StandIn | None:
        self.decoded += 1
        out.fill_(1)
        lse.fill_(2)
        return self if self.repeats else None

    def workspace_size(self, problem: Any, bounds: Any, target: Any) -> int:
        return WORKSPACE_BYTES

    def ready(self) -> bool:
        return self.is_ready

    def bind(self, addresses: Sequence[int]) -> Sequence[int]:
        return list(addresses)

    def launch(self, bound: Sequence[int]) -> None:
        self.launched.append(bound)


@pytest.fixture(name="backend")
def make_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setattr(kernels, "load", lambda name: stand_in)
    MEMO.clear()
    yield stand_in
    MEMO.clear()


def make_call() -> dict[str, Any]:
    return {
        "q": torch.randn(TOKENS, HEADS, RANK + ROPE),
        "kv_cache": torch.randn(7, PAGE, RANK + ROPE),
        "block_table": torch.zeros(TOKENS, 6, dtype=torch.int32),
        "seq_lens": torch.ones(TOKENS, dtype=torch.int32),
        "cu_seqlens_q": torch.arange(TOKENS + 1, dtype=torch.int32),
        "out": torch.empty(TOKENS, HEADS, RANK),
        "lse": torch.empty(TOKENS, HEADS),
        "workspace": torch.empty(WORKSPACE_BYTES, dtype=torch.uint8),
    }


def decode(call: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    return pagedmla.decode(**{"softmax_scale": 0.1, "kv_lora_rank": RANK} | call | options)


def addresses(call: dict[str, Any]) -> list[int]:
    q = call["q"]
    found = call | (dict(zip(("q", "q_pe"), q, strict=True)) if isinstance(q, tuple) else {})
    return [found[name].data_ptr() if found.get(name) is not None else 0 for name in SLOTS]
