"""Faults of kind MODEL: the softmax scale and the rotated part."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import Kernel
from torch import Tensor


class ScaleGuessed(Kernel):
    """The scale comes from the width of a cached token (onnxruntime/mobius #548, in spirit)."""

    kind = "MODEL"

    def softmax_scale(self) -> float:
        return self.width**-0.5


class ScaleOfTheLatentOnly(Kernel):
    """The rotated part's product is added after scaling."""

    kind = "MODEL"

    def products(self, q: Tensor, tile: Tensor) -> Tensor:
        latent = super().products(q[:, : self.rank], tile[:, : self.rank])
        return latent + super().products(q[:, self.rank :], tile[:, self.rank :]) / self.softmax_scale()


class PairsTakenApart(Kernel):
    """Rotated keys are thought to be stored as pairs, the queries' are not (sglang #30088)."""

    kind = "MODEL"

    def products(self, q: Tensor, tile: Tensor) -> Tensor:
        latent, rope = tile[:, : self.rank], tile[:, self.rank :]
        return super().products(q, torch.cat([latent, rope[:, ::2], rope[:, 1::2]], 1))


class ScaleAtMostOne(Kernel):
    """A scale is clamped to what a head size can give: YaRN's factor may lift it above."""

    kind = "MODEL"

    def softmax_scale(self) -> float:
        return min(self.args.softmax_scale, 192**-0.5)


FAULTS = (ScaleGuessed, ScaleOfTheLatentOnly, PairsTakenApart, ScaleAtMostOne)
