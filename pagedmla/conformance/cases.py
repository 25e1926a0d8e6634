"""Named cases: for every problem that the support table accepts, one ragged batch that visits its edges.

The list is generated from the table, so a configuration that is accepted and never run cannot exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import accepted_problems
from pagedmla.contract.target import Target

_DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
}


@dataclass(frozen=True)
class Case:
    """One batch for one problem.

    Attributes:
        name: readable and unique in its list.
        problem: the static half.
        seq_lens: keys of each sequence, in tokens.
        q_lens: query tokens of each sequence; all equal means that ``cu_seqlens_q`` is left out.
    """

    name: str
    problem: DecodeProblem
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def ragged(self) -> bool:
        """Whether sequences differ in their number of query tokens."""
        return len(set(self.q_lens)) > 1


def cases_for(target: Target, backend: str) -> list[Case]:
    """One case for each problem that ``backend`` accepts on ``target``, in the table's order.

    Raises:
        InvalidArgument: no backend has this name.
    """
    problems = accepted_problems(target, backend)
    return [case_of(problem, index) for index, problem in enumerate(problems)]


def count_cases(target: Target, backend: str) -> int:
    """How many cases ``cases_for`` has, for a progress bar.

    Raises:
        InvalidArgument: no backend has this name.
    """
    return len(accepted_problems(target, backend))


def case_of(problem: DecodeProblem, index: int = 0) -> Case:
    """The case of one problem.

    Args:
        problem: any problem.
        index: turns the order of the sequences, so that over a list every position meets every length, and
            makes every fourth batch of several query tokens an even one.
    """
    lengths = _edge_lengths(problem)
    turn = index % len(lengths)
    seq_lens = lengths[turn:] + lengths[:turn]
    longest = problem.max_q_len
    if longest == 1 or index % 4 == 3:
        q_lens = (longest,) * len(seq_lens)
    else:
        # 0, the most, 1, and what lies between, again turned
        pattern = (longest, 0, 1, max(1, longest - 1), longest)
        q_lens = tuple(pattern[(position + index) % len(pattern)] for position in range(len(seq_lens)))
    return Case(_name(problem), problem, seq_lens, q_lens)


def _edge_lengths(problem: DecodeProblem) -> tuple[int, ...]:
    """0, 1, a length below the query length, around one page, and the two primes of the founding fault."""
    page = problem.page_size
    lengths = [131, 0, page, 1, page + 1, 127, page - 1]
    if problem.max_q_len > 2:
        lengths.append(problem.max_q_len - 1)
    return tuple(dict.fromkeys(lengths))


def _name(problem: DecodeProblem) -> str:
    """Such as ``h16-p64-512+64-bf16/bf16-q1``, with what is not the default behind it."""
    dtypes = f"{_DTYPE_NAMES[problem.q_dtype]}/{problem.kv_layout}"
    parts = [
        f"h{problem.num_heads}",
        f"p{problem.page_size}",
        f"{problem.kv_lora_rank}+{problem.qk_rope_head_dim}",
        dtypes,
        f"q{problem.max_q_len}",
    ]
    if not problem.causal:
        parts.append("full")
    if problem.schedule is not None:
        parts.append(problem.schedule)
    if problem.num_kv_splits is not None:
        parts.append(f"s{problem.num_kv_splits}")
    if problem.batch_invariant:
        parts.append("invariant")
    return "-".join(parts)
