"""Named layouts of a cached token: which bytes stand where, and how they are read.

A latent cache is ONE tensor, ``[num_pages, page_size, head_dim_qk]``: per token first ``kv_lora_rank`` latent numbers, then
``qk_rope_head_dim`` rotated key numbers (DeepSeek-V2, section 2.1).  There is no second tensor for values, so the bytes of
a page are exactly ``page_size * bytes_per_token``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedmla.contract.errors import InvalidArgument


@dataclass(frozen=True)
class KVLayout:
    """How one cached token is stored.

    Attributes:
        name: the layout's name in errors, ``explain`` and docs.
        dtype: the element type of the cache tensor.
        scaled: whether values are stored divided by one per-tensor scale, which a reader multiplies back.
        packed_bytes_per_token: bytes of a token for layouts that pack several types (fixed dims), else None.
        description: the fields in order, for docs.
    """

    name: str
    dtype: torch.dtype
    scaled: bool
    description: str
    packed_bytes_per_token: int | None = None

    @property
    def max_value(self) -> float:
        """The largest finite number an element holds; a writer clamps to it."""
        return torch.finfo(self.dtype).max

    def bytes_per_token(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Bytes of one cached token of one layer."""
        if self.packed_bytes_per_token is not None:
            return self.packed_bytes_per_token
        return (kv_lora_rank + qk_rope_head_dim) * self.dtype.itemsize


_LAYOUTS = (
    KVLayout("bf16", torch.bfloat16, False, "latent then rope, bfloat16"),
    KVLayout("fp16", torch.float16, False, "latent then rope, float16"),
    KVLayout("fp32", torch.float32, False, "latent then rope, float32"),
    KVLayout(
        "fp8_per_tensor", torch.float8_e4m3fn, True, "latent then rope, e4m3fn, one scale for both parts"
    ),
    KVLayout(
        "fp8_fnuz_per_tensor",
        torch.float8_e4m3fnuz,
        True,
        "latent then rope, e4m3fnuz (gfx942), one scale for both parts",
    ),
    KVLayout(
        "fp8_ds_mla",
        torch.uint8,
        False,
        "512 e4m3fn latent bytes, 4 float32 scales (one per 128 latents), 64 bfloat16 rope numbers",
        packed_bytes_per_token=512 + 4 * 4 + 64 * 2,
    ),
)

KV_LAYOUTS: dict[str, KVLayout] = {layout.name: layout for layout in _LAYOUTS}


def layout_of_dtype(dtype: torch.dtype) -> KVLayout:
    """The layout that a cache tensor of ``dtype`` has.

    The format comes from the dtype, never from a flag: an e4m3fn and an e4m3fnuz cache differ in bytes and in type.

    Raises:
        InvalidArgument: no layout has this element type.
    """
    for layout in _LAYOUTS:
        if layout.dtype == dtype:
            return layout
    wanted = "one of " + ", ".join(f"{layout.dtype} ({layout.name})" for layout in _LAYOUTS)
    raise InvalidArgument("kv_dtype", "kv_cache", wanted, str(dtype))
