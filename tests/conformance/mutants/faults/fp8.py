"""Faults of kind FP8: the format of a cache and its scale."""

from __future__ import annotations

import math

import torch
from conformance.mutants.kernel import Kernel
from conformance.mutants.plan_step import FLOAT8
from torch import Tensor


class ValuesUnscaled(Kernel):
    """The scale meets the keys, and never the values (sglang #34765)."""

    kind = "FP8"

    def value_scale(self) -> float:
        return 1.0


class FnuzReadAsFn(Kernel):
    """Codes of the one format are read as the other's (sglang #28455)."""

    kind = "FP8"

    def decode(self, stored: Tensor) -> Tensor:
        return (stored.view(torch.float8_e4m3fn) if stored.dtype in FLOAT8 else stored).float()


class FnReadAsFnuz(Kernel):
    """The other way round: half of the value, and nan for minus zero."""

    kind = "FP8"

    def decode(self, stored: Tensor) -> Tensor:
        return (stored.view(torch.float8_e4m3fnuz) if stored.dtype in FLOAT8 else stored).float()


class ScaleRoundedToAPower(Kernel):
    """The scale goes through eight bits of exponent (vllm #49435)."""

    kind = "FP8"

    def key_scale(self) -> float:
        return 2.0 ** round(math.log2(super().key_scale()))


class ScaleThroughBf16(Kernel):
    """The scale goes through bfloat16."""

    kind = "FP8"

    def key_scale(self) -> float:
        return torch.tensor(super().key_scale()).to(torch.bfloat16).item()


class RopeUnscaled(Kernel):
    """The scale meets the latent part only."""

    kind = "FP8"

    def scores(self, q: Tensor, tile: Tensor) -> Tensor:
        inverse = torch.ones(self.width)
        inverse[self.rank :] /= self.key_scale()
        return super().scores(q, tile * inverse)


class SubnormalsFlushed(Kernel):
    """The smallest codes are read as 0."""

    kind = "FP8"

    def decode(self, stored: Tensor) -> Tensor:
        values = super().decode(stored)
        if stored.dtype not in FLOAT8:
            return values
        return torch.where(values.abs() < torch.finfo(stored.dtype).smallest_normal, 0.0, values)


FAULTS = (
    ValuesUnscaled,
    FnuzReadAsFn,
    FnReadAsFnuz,
    ScaleRoundedToAPower,
    ScaleThroughBf16,
    RopeUnscaled,
    SubnormalsFlushed,
)
