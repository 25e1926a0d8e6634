"""The sizes of a model's latent attention: what its keys and values would take, and the backend that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import choose_backend
from pagedmla.contract.target import Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LatentShape:
    """The sizes of one attention layer that caches a latent."""

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


def latent_shapes(model: torch.nn.Module) -> Iterator[LatentShape]:
    """The shape of every layer that caches a latent, so a hybrid's other layers do not count.

    Layers are found by what they have: ``kv_b_proj`` and ``kv_lora_rank``.
    """
    for module in model.modules():
        if hasattr(module, "kv_b_proj") and hasattr(module, "kv_lora_rank"):
            yield LatentShape(
                **{name: int(getattr(module, name)) for name in LatentShape.__dataclass_fields__}
            )


def decompressed_bytes_per_token(model: torch.nn.Module) -> int:
    """Bytes that one token's keys and values would take, were they cached for every head.

    ``num_heads * (qk_nope_head_dim + qk_rope_head_dim + v_head_dim)`` numbers of the model's dtype, summed over the
    layers that cache a latent instead.
    """
    numbers = 0
    for shape in latent_shapes(model):
        per_head = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
        numbers += shape.num_heads * per_head
    return numbers * next(model.parameters()).dtype.itemsize


def chosen_backend(model: torch.nn.Module, page_size: int, backend: str | None) -> str:
    """The backend that decodes ``model``'s layers with pages of ``page_size`` tokens: ``backend`` when named.

    Raises:
        Unsupported: no backend, or not the named one, takes the model.
    """
    parameter = next(model.parameters())
    shape = next(latent_shapes(model))
    problem = DecodeProblem(
        num_heads=shape.num_heads,
        softmax_scale=1.0,  # no rule of the table looks at it
        kv_lora_rank=shape.kv_lora_rank,
        qk_rope_head_dim=shape.qk_rope_head_dim,
        page_size=page_size,
        q_dtype=parameter.dtype,
        kv_layout=layout_of_dtype(parameter.dtype).name,
    )
    return choose_backend(problem, Target.detect(parameter.device), backend)
