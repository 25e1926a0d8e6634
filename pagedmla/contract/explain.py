"""Why a problem runs where it runs, and how fast it could: ``pagedmla.explain``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedmla.contract.errors import check_type
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.support import BACKENDS, Refusal, backends_to_choose_from, refusals
from pagedmla.contract.target import Target


@dataclass(frozen=True)
class Explanation:
    """The answer of ``explain``.

    Attributes:
        problem, target: what was asked.
        backend: the backend that would run it, or None when all refuse.
        refused: every reason of every backend that does not take it.
        num_keys: cached tokens that the numbers below are for, all sequences together.
        bytes_read: bytes of the cache that are read, each token once.
        flops: operations of the two products: 2 * heads * query tokens * keys * (head_dim_qk + kv_lora_rank).
        roofline_seconds: the larger of reading and arithmetic at the target's measured rates; None where it has none.
    """

    problem: DecodeProblem
    target: Target
    backend: str | None
    refused: tuple[Refusal, ...]
    num_keys: int
    bytes_read: int
    flops: int
    roofline_seconds: float | None

    def __str__(self) -> str:
        chosen = f"{self.backend}: {BACKENDS[self.backend].summary}" if self.backend else "none"
        lines = [f"problem   {self.problem}", f"target    {self.target}", f"backend   {chosen}"]
        lines += [f"not       {refusal}" for refusal in self.refused]
        lines.append(f"work      {self.num_keys} keys: {self.bytes_read} bytes, {self.flops} FLOP")
        if self.roofline_seconds is None:
            lines.append("roofline  unknown: this target's rates were not measured")
        else:
            lines.append(f"roofline  {self.roofline_seconds * 1e6:.1f} us")
        return "\n".join(lines)


def explain(
    problem: DecodeProblem, target: Target | None = None, bounds: BatchBounds | None = None
) -> Explanation:
    """Which backend runs ``problem`` and why, why the others do not, and what the work is.

    Args:
        problem: what would be asked of a kernel.
        target: the machine; left out: this one (the first CUDA device if there is one, else the CPU).
        bounds: the batch that the numbers are for, every sequence as long as its table allows; left out: one page of one
            sequence.
    """
    check_type("problem", problem, DecodeProblem)
    target = target if target is not None else _this_machine()
    check_type("target", target, Target)
    bounds = bounds if bounds is not None else BatchBounds(max_num_seqs=1, max_pages_per_seq=1)
    check_type("bounds", bounds, BatchBounds)
    by_backend = {name: refusals(problem, target, name) for name in BACKENDS}
    num_keys = bounds.max_num_seqs * bounds.max_pages_per_seq * problem.page_size
    bytes_read = num_keys * problem.layout.bytes_per_token(problem.kv_lora_rank, problem.qk_rope_head_dim)
    flops = (
        2 * problem.num_heads * problem.max_q_len * num_keys * (problem.head_dim_qk + problem.kv_lora_rank)
    )
    seconds = None
    if target.read_bytes_per_s and target.matmul_flops_per_s:
        seconds = max(bytes_read / target.read_bytes_per_s, flops / target.matmul_flops_per_s)
    return Explanation(
        problem=problem,
        target=target,
        backend=next((name for name in backends_to_choose_from(target) if not by_backend[name]), None),
        refused=tuple(refusal for found in by_backend.values() for refusal in found),
        num_keys=num_keys,
        bytes_read=bytes_read,
        flops=flops,
        roofline_seconds=seconds,
    )


def _this_machine() -> Target:
    return Target.detect("cuda" if torch.cuda.is_available() else "cpu")
