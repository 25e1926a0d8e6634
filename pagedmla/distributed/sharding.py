"""Which rank holds which token of a sequence, and where.

Every layout keeps a rank's tokens in the order of the sequence.  So of a sequence's first s tokens a rank always holds its own
first c, and c is arithmetic: what a query may see is a number on each rank, not a list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla.contract.arguments import expect
from pagedmla.contract.errors import InvalidArgument, check_type


@dataclass(frozen=True, eq=False)
class KeySharding:
    """How the tokens of every sequence are shared out over ranks 0 .. n - 1; made by the three functions below.

    Attributes:
        kind: "contiguous" or "interleaved".
        run: tokens in a row on one rank.  For "contiguous" that may be None, or i32 [num_seqs].
    """

    kind: str
    run: int | Tensor | None

    def __post_init__(self) -> None:
        """Raises InvalidArgument unless the fields belong together."""
        if self.kind not in ("contiguous", "interleaved"):
            raise InvalidArgument("kind", "kind", "'contiguous' or 'interleaved'", repr(self.kind))
        if isinstance(self.run, Tensor) and self.kind == "contiguous":
            expect(self.run, "tokens_per_rank", (None,), (torch.int32,), None)
        elif self.run is not None or self.kind == "interleaved":
            _count("run" if self.kind == "interleaved" else "tokens_per_rank", self.run)

    @classmethod
    def contiguous(cls, tokens_per_rank: int | Tensor | None = None) -> KeySharding:
        """Rank r holds tokens r * c .. (r + 1) * c - 1, and the last rank all that follow.

        Args:
            tokens_per_rank: c in tokens, for all sequences or i32 [num_seqs] on the device.  None: seq_len / n, rounded up.
                That moves the cuts when a sequence grows, so it is for contexts that do not; a prompt that was cut into n
                parts of ceil(len / n) and is generated on from has this number for its own, and new tokens go to the last
                rank.  A number below 1 on the device counts as 1.
        """
        return cls("contiguous", tokens_per_rank)

    @classmethod
    def round_robin(cls) -> KeySharding:
        """Token t is on rank t mod n."""
        return cls("interleaved", 1)

    @classmethod
    def interleaved(cls, run: int) -> KeySharding:
        """Token t is on rank (t // run) mod n: ``run`` tokens in a row on one rank, then the next rank's turn."""
        return cls("interleaved", run)

    def __str__(self) -> str:
        run = f"i32 {list(self.run.shape)}" if isinstance(self.run, Tensor) else self.run
        return f"{self.kind}({run})"

    def owned(self, seen: Tensor, seq_lens: Tensor, rank: int, num_ranks: int) -> Tensor:
        """How many of each sequence's first ``seen`` tokens are on ``rank``; nothing is read on the host.

        Args:
            seen: i64 [num_seqs, ...], at least 0.
            seq_lens: i64, all tokens of the sequence, at least 0; broadcasts to ``seen``.

        Returns:
            i64, the shape of ``seen``.
        """
        if self.kind == "interleaved":
            run = _count("run", self.run)
            cycle = run * num_ranks
            return seen // cycle * run + (seen % cycle - rank * run).clamp(0, run)
        run_of_each = self._contiguous_run(seq_lens, num_ranks)
        mine = (seen - rank * run_of_each).clamp(min=0)
        return mine if rank == num_ranks - 1 else torch.minimum(mine, run_of_each)

    def place(self, positions: Tensor, seq_lens: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
        """Where tokens belong: for whoever writes the caches.

        Args:
            positions: i64 [num_seqs, ...], of tokens in their sequence, 0 .. seq_len - 1.
            seq_lens: i64, all tokens of the sequence; broadcasts to ``positions``.

        Returns:
            (rank, position among that rank's tokens of the sequence), i64, the shape of ``positions``.
        """
        if self.kind == "interleaved":
            run = _count("run", self.run)
            turn = positions // run
            return turn % num_ranks, turn // num_ranks * run + positions % run
        run_of_each = self._contiguous_run(seq_lens, num_ranks)
        ranks = (positions // run_of_each).clamp(max=num_ranks - 1)
        return ranks, positions - ranks * run_of_each

    def _contiguous_run(self, seq_lens: Tensor, num_ranks: int) -> Tensor:
        if self.run is None:
            run = (seq_lens + num_ranks - 1) // num_ranks
        elif isinstance(self.run, Tensor):
            # one number a sequence, whatever dimensions follow
            run = self.run.to(torch.int64).view(-1, *(1,) * (seq_lens.dim() - 1))
        else:
            run = torch.full_like(seq_lens, self.run)
        return run.clamp(min=1)


def check_rank(rank: object, num_ranks: object) -> None:
    """Raises InvalidArgument unless ``num_ranks`` >= 1 and ``rank`` is one of them."""
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise InvalidArgument("num_ranks", "num_ranks", "a whole number >= 1", repr(num_ranks))
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < num_ranks:
        raise InvalidArgument("rank", "rank", f"a whole number in 0..{num_ranks - 1}", repr(rank))


def check_sharding(sharding: object, num_seqs: int, device: torch.device) -> None:
    """Raises InvalidArgument unless ``sharding`` is a KeySharding that fits ``num_seqs`` sequences on ``device``."""
    check_type("sharding", sharding, KeySharding)
    if isinstance(sharding, KeySharding) and isinstance(sharding.run, Tensor):
        expect(sharding.run, "tokens_per_rank", (num_seqs,), (torch.int32,), device)


def _count(name: str, value: object) -> int:
    # 2^31: lengths are 32-bit, so that more says nothing and products stay within 64 bits
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31:
        raise InvalidArgument(name, name, "a whole number in 1..2^31", repr(value))
    return value
