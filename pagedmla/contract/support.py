"""THE support table: what each backend accepts, stated once.

The dispatcher, the errors, ``explain``, ``pagedmla info``, the generated docs/support.md and the tests' parameter lists all
ask this module, so a configuration that is accepted and never tested cannot exist.

A backend is a row: each of its rules looks at one field of the problem and says either nothing or why not.  To build a
feature, change the rule here; the tests, docs and messages follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from pagedmla.contract import rules_gluon, rules_torch, rules_triton
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.kv_layout import KV_LAYOUTS
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.rules import Rule
from pagedmla.contract.target import Target


@dataclass(frozen=True)
class Refusal:
    """One reason why a backend does not take a problem.

    Attributes:
        backend: the backend that refuses.
        code: a stable word, the same as the error's.
        argument: the argument at fault.
        wanted: what this backend takes.
        got: what came.
    """

    backend: str
    code: str
    argument: str
    wanted: str
    got: str

    def __str__(self) -> str:
        return (
            f"{self.backend} backend refuses {self.argument}={self.got}: it takes {self.wanted} [{self.code}]"
        )


@dataclass(frozen=True)
class BackendSupport:
    """A backend's row of the table.

    Attributes:
        name: the word that ``backend=`` takes.
        summary: one line for people.
        rules: all are asked; every one that answers is a refusal.
        named_only_on: vendors where it is never chosen, only taken or refused when it is named.
        weights: the dtype that it rounds softmax weights to before they meet the values, ``"float32"`` or ``"kv_cache"``:
            the cache's.  It is part of the error bound.
    """

    name: str
    summary: str
    rules: tuple[Rule, ...]
    named_only_on: tuple[str, ...] = ()
    weights: Literal["float32", "kv_cache"] = "float32"

    def p_dtype(self, problem: DecodeProblem) -> torch.dtype:
        """The dtype that softmax weights are rounded to for ``problem``."""
        return torch.float32 if self.weights == "float32" else problem.layout.dtype


BACKENDS: dict[str, BackendSupport] = {
    "gluon": BackendSupport(
        "gluon",
        "NVIDIA Hopper's own matrix and copy instructions",
        rules_gluon.RULES,
        # whoever asks there for the best backend need not read of Hopper in the refusals
        named_only_on=("cpu", "amd"),
        weights="kv_cache",
    ),
    "triton": BackendSupport(
        "triton",
        "one Triton source for every GPU that Triton reaches",
        rules_triton.RULES,
        # Triton's interpreter is for checking values, thousands of times slower than torch
        named_only_on=("cpu",),
        weights="kv_cache",
    ),
    "torch": BackendSupport(
        "torch",
        "plain torch operations; any device that torch has",
        rules_torch.RULES,
    ),
}
"""Every backend that is built, best first: the first one without a refusal is chosen."""


def check_backend_name(backend: object) -> None:
    """Raises InvalidArgument unless ``backend`` is None or the name of a built backend."""
    if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
        raise InvalidArgument("backend", "backend", "None or one of " + ", ".join(BACKENDS), repr(backend))


def backends_to_choose_from(target: Target) -> list[str]:
    """The backends that may run on ``target`` without being named, best first."""
    return [name for name, row in BACKENDS.items() if target.vendor not in row.named_only_on]


@lru_cache(maxsize=4096)
def refusals(problem: DecodeProblem, target: Target, backend: str) -> tuple[Refusal, ...]:
    """Every reason why ``backend`` does not take ``problem`` on ``target``; empty when it does.

    Raises:
        InvalidArgument: no backend has this name.
    """
    check_backend_name(backend)
    answers = (rule(problem, target) for rule in BACKENDS[backend].rules)
    return tuple(Refusal(backend, *answer) for answer in answers if answer is not None)


@lru_cache(maxsize=4096)
def choose_backend(
    problem: DecodeProblem,
    target: Target,
    backend: str | None = None,
    passed_over: tuple[Refusal, ...] = (),
) -> str:
    """The backend that runs ``problem``: ``backend`` itself when named, else the best that takes it.

    ``passed_over``: refusals of backends that take the problem, but not the tensors of a call; they are not chosen.

    Raises:
        InvalidArgument: no backend has this name.
        Unsupported: it is refused, with every reason.
    """
    check_backend_name(backend)
    reasons: list[Refusal] = list(passed_over)
    names = [backend] if backend is not None else backends_to_choose_from(target)
    refused = {refusal.backend for refusal in passed_over}
    for name in (name for name in names if name not in refused):
        found = refusals(problem, target, name)
        if not found:
            return name
        reasons.extend(found)
    raise Unsupported.from_refusals(reasons)


@dataclass(frozen=True)
class Axis:
    """One direction of the table.

    Attributes:
        field: the field (or fields) of DecodeProblem that it moves.
        rule: what is accepted, in words, for docs.
        samples: values that checks and tests visit, each a dict of fields; edges and odd values included.
    """

    field: str
    rule: str
    samples: tuple[dict[str, object], ...]


_HEADS = (1, 2, 4, 5, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128)
_PAGES = (1, 2, 3, 16, 32, 64, 128, 192, 256, 480)
_DIMS = ((512, 64), (256, 64), (256, 32), (128, 32), (512, 0))
_QUERY_LENGTHS = (1, 2, 3, 4, 8, 16)

AXES: tuple[Axis, ...] = (
    Axis("num_heads", "any number >= 1", tuple({"num_heads": value} for value in _HEADS)),
    Axis("page_size", "any number >= 1", tuple({"page_size": value} for value in _PAGES)),
    Axis(
        "kv_lora_rank, qk_rope_head_dim",
        "any latent size >= 1 with any even rope size, 0 included",
        tuple({"kv_lora_rank": rank, "qk_rope_head_dim": rope} for rank, rope in _DIMS),
    ),
    Axis(
        "max_q_len",
        "any number >= 1, ragged or even",
        tuple({"max_q_len": value} for value in _QUERY_LENGTHS),
    ),
    Axis(
        "q_dtype, kv_layout",
        "q and cache of one dtype, or an fp8 cache (per-tensor scale) under q of another",
        tuple(
            {"q_dtype": dtype, "kv_layout": layout}
            for dtype in (
                torch.bfloat16,
                torch.float16,
                torch.float32,
                torch.float8_e4m3fn,
                torch.float8_e4m3fnuz,
            )
            for layout in KV_LAYOUTS
        ),
    ),
    Axis("causal", "true or false", ({"causal": True}, {"causal": False})),
    Axis(
        "schedule",
        "see the refusals",
        ({"schedule": None}, {"schedule": "split"}, {"schedule": "persistent"}),
    ),
    Axis(
        "num_kv_splits",
        "any number >= 1, or None",
        tuple({"num_kv_splits": value} for value in (None, 1, 2, 3, 7, 64)),
    ),
    Axis("batch_invariant", "true or false", ({"batch_invariant": False}, {"batch_invariant": True})),
)
"""What a problem may vary in.  ``sample_problems`` walks it; docs/support.md prints it."""


def sample_problems(softmax_scale: float = 0.07) -> Iterator[DecodeProblem]:
    """Problems that cover the table: each axis's every value against the base, and against each value of the other axes
    at least once in pairs where the two interact (dtypes, dims, heads and pages with the modes).

    The count stays in the hundreds: a full product would be a hundred thousand, nearly all of them repeats.
    """
    seen: set[DecodeProblem] = set()
    base: dict[str, object] = {"num_heads": 16, "softmax_scale": softmax_scale}
    modes: tuple[dict[str, object], ...] = (
        {},
        {"batch_invariant": True},
        {"num_kv_splits": 3, "max_q_len": 3},
        {"causal": False, "max_q_len": 2, "page_size": 3},
    )
    pairs = [sample for axis in AXES if axis.field == "q_dtype, kv_layout" for sample in axis.samples]
    for axis in AXES:
        for sample in axis.samples:
            for mode in modes:
                yield from _unseen(seen, base | mode | sample)
            # rows of a sequence are heads times query tokens: few heads with many tokens, and each schedule with many heads
            if axis.field == "num_heads":
                yield from _unseen(seen, base | {"max_q_len": 16} | sample)
            if axis.field == "schedule":
                yield from _unseen(seen, base | {"num_heads": 128, "max_q_len": 2} | sample)
            if axis.field in ("num_heads", "page_size", "kv_lora_rank, qk_rope_head_dim"):
                for pair in pairs:
                    yield from _unseen(seen, base | sample | pair)


def _unseen(seen: set[DecodeProblem], values: dict[str, object]) -> Iterator[DecodeProblem]:
    problem = DecodeProblem(**values)  # type: ignore[arg-type]
    if problem not in seen:
        seen.add(problem)
        yield problem


def accepted_problems(target: Target, backend: str) -> list[DecodeProblem]:
    """Those of ``sample_problems`` that ``backend`` takes on ``target``: what checks and tests must run."""
    return [problem for problem in sample_problems() if not refusals(problem, target, backend)]
