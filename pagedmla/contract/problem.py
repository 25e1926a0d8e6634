"""What is asked of a kernel, as data: the static half of a decode call, and the capacities a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from pagedmla.contract.errors import InvalidArgument
from pagedmla.contract.kv_layout import KV_LAYOUTS, KVLayout

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
SCHEDULES = ("split", "persistent")


def out_dtype_of(q_dtype: torch.dtype) -> torch.dtype:
    """The dtype of ``out``: q's own; bfloat16 for fp8 queries, since an fp8 output would need a scale of its own."""
    return torch.bfloat16 if q_dtype.itemsize == 1 else q_dtype


def check_softmax_scale(softmax_scale: object) -> float:
    """Returns ``softmax_scale`` as a float.

    Raises:
        InvalidArgument: it is not a real number, not finite, not positive, or vanishes in float32, in which kernels use it.
    """
    wanted = "a positive finite float (head size before absorption, with YaRN's factor)"
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise InvalidArgument("softmax_scale", "softmax_scale", wanted, f"{softmax_scale!r}")
    try:
        value = float(softmax_scale)
    except OverflowError:
        raise InvalidArgument(
            "softmax_scale", "softmax_scale", wanted, "a whole number past every float"
        ) from None
    # smallest normal and largest float32: the number is validated in the precision in which it is used; NaN and the
    # infinities fail the comparison too
    if not 1.1754944e-38 <= value <= 3.4028234e38:
        raise InvalidArgument("softmax_scale", "softmax_scale", wanted, f"{softmax_scale!r}")
    return value


@dataclass(frozen=True)
class DecodeProblem:
    """The static half of a decode call: everything that decides which kernel may run, and nothing that lives on the device.

    Attributes:
        num_heads: query heads on this device, >= 1.
        softmax_scale: multiplies the scores; from the head size before absorption, with YaRN's factor.  No default.
        kv_lora_rank: latent numbers of a cached token, which are also its value.
        qk_rope_head_dim: rotated key numbers of a cached token; even, 0 for models without RoPE.
        page_size: tokens in a page of the cache tensor.
        q_dtype: dtype of the queries.
        kv_layout: name of the cache's layout, see ``KV_LAYOUTS``.
        max_q_len: most query tokens of one sequence in one call.
        causal: query j of n sees keys 0 .. seq_len - n + j; otherwise every query sees every key.
        schedule: ``"split"``, ``"persistent"`` or None (the backend's choice).
        num_kv_splits: parts that each sequence's keys are cut into, or None (the backend's choice).
        batch_invariant: a row's bits must not depend on the other rows of the call.

    Raises:
        InvalidArgument: a field that no backend could ever accept.
    """

    num_heads: int
    softmax_scale: float
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int = 64
    q_dtype: torch.dtype = torch.bfloat16
    kv_layout: str = "bf16"
    max_q_len: int = 1
    causal: bool = True
    schedule: str | None = None
    num_kv_splits: int | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "page_size", "max_q_len"):
            _check_count(name, getattr(self, name), minimum=1)
        _check_count("qk_rope_head_dim", self.qk_rope_head_dim, minimum=0)
        if self.qk_rope_head_dim % 2:
            raise InvalidArgument(
                "qk_rope_head_dim",
                "qk_rope_head_dim",
                "an even number (RoPE turns pairs)",
                str(self.qk_rope_head_dim),
            )
        check_softmax_scale(self.softmax_scale)
        if self.q_dtype not in QUERY_DTYPES:
            wanted = "one of " + ", ".join(str(dtype) for dtype in QUERY_DTYPES)
            raise InvalidArgument("q_dtype", "q", wanted, str(self.q_dtype))
        if not isinstance(self.kv_layout, str) or self.kv_layout not in KV_LAYOUTS:
            raise InvalidArgument(
                "kv_layout", "kv_layout", "one of " + ", ".join(KV_LAYOUTS), repr(self.kv_layout)
            )
        if self.schedule is not None and not (isinstance(self.schedule, str) and self.schedule in SCHEDULES):
            raise InvalidArgument(
                "schedule", "schedule", "None or one of " + ", ".join(SCHEDULES), repr(self.schedule)
            )
        if self.num_kv_splits is not None:
            _check_count("num_kv_splits", self.num_kv_splits, minimum=1)
        for name in ("causal", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(name, name, "a bool", repr(getattr(self, name)))

    @property
    def head_dim_qk(self) -> int:
        """Numbers of a query row and of a cached token: latent and rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of ``out``."""
        return out_dtype_of(self.q_dtype)

    @property
    def layout(self) -> KVLayout:
        """The cache's layout."""
        return KV_LAYOUTS[self.kv_layout]

    def __str__(self) -> str:
        names = (field.name for field in fields(self))
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


@dataclass(frozen=True)
class BatchBounds:
    """Capacities of a plan: persistent buffers are made this large, once.

    Attributes:
        max_num_seqs: most sequences of a step, padding rows included.
        max_pages_per_seq: most pages of one sequence, which is the width of the plan's block table.
        max_num_tokens: most query tokens of a step, padding included; left out: ``max_num_seqs * max_q_len``.

    Raises:
        InvalidArgument: a capacity that is not a positive whole number.
    """

    max_num_seqs: int
    max_pages_per_seq: int
    max_num_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_count("max_num_seqs", self.max_num_seqs, minimum=1)
        _check_count("max_pages_per_seq", self.max_pages_per_seq, minimum=1)
        if self.max_num_tokens is not None:
            _check_count("max_num_tokens", self.max_num_tokens, minimum=1)

    def num_tokens(self, problem: DecodeProblem) -> int:
        """Most query tokens of a step for ``problem``."""
        return (
            self.max_num_tokens if self.max_num_tokens is not None else self.max_num_seqs * problem.max_q_len
        )


def _check_count(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidArgument(name, name, f"a whole number >= {minimum}", repr(value))
