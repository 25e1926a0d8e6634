"""All ranks call the same, or all ranks learn which does not: before a collective that would hang or mix up bytes.

The ranks write what they call into the group's key-value store and read what the others wrote.  No collective is involved: a
check works alike under gloo and NCCL, waits for no device, is bounded by a time limit of its own, and cannot be mistaken for
another collective when one rank checks and another does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from pagedmla.contract.errors import InvalidArgument, PagedMLAError


class Agreement:
    """The checks of one object in one group, counted alike on every rank.

    Args:
        group: the ranks.
        timeout: seconds that a check waits for the slowest rank.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._store = group.get_group_store()
        self._rank, self._num_ranks = group.rank(), group.size()
        self._timeout = timeout
        # ranks make their objects of a group in the same order, so that equal numbers are the same object
        number = self._store.add(f"pagedmla/context_parallel/objects/{self._rank}", 1)
        self._prefix = f"pagedmla/context_parallel/{number}"
        self._checks = 0

    def check(self, call: Mapping[str, str] | PagedMLAError) -> None:
        """Compares what the ranks call.

        Args:
            call: name -> value of all that must be equal; or why this rank refuses its own arguments.

        Raises:
            InvalidArgument: on every rank, naming the ranks: values that differ, a rank that refuses its arguments (that
                rank raises its own error), or ranks that did not come within the time limit.
        """
        self._checks += 1
        check = self._checks
        text = {"refused": str(call)} if isinstance(call, PagedMLAError) else {"call": dict(call)}
        self._store.set(self._key(check, self._rank), json.dumps(text))
        if isinstance(call, PagedMLAError):
            raise call
        keys = [self._key(check, rank) for rank in range(self._num_ranks)]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout))
            answers = [json.loads(answer) for answer in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise self._absent(keys, error) from error
        if check > 1:
            # whoever wrote this check's key has read the last one's
            self._store.delete_key(self._key(check - 1, self._rank))
        _compare(answers)

    def _key(self, check: int, rank: int) -> str:
        return f"{self._prefix}/{check}/{rank}"

    def _absent(self, keys: Sequence[str], error: RuntimeError) -> InvalidArgument:
        wanted = f"all {self._num_ranks} ranks at this call within {self._timeout:g} s"
        try:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            # the process that holds the store is gone, too
            return InvalidArgument(
                "rank_absent", "group", wanted, f"no answer from the group's store: {error}"
            )
        got = f"nothing from {_ranks(absent)}: not there, late, or at a call that it had checked before"
        return InvalidArgument("rank_absent", "group", wanted, got)


def _compare(answers: Sequence[Mapping[str, object]]) -> None:
    refusals = [f"{_ranks([rank])}: {a['refused']}" for rank, a in enumerate(answers) if "refused" in a]
    if refusals:
        wanted = "arguments that every rank accepts"
        raise InvalidArgument("rank_refused", "group", wanted, "; ".join(refusals))
    calls = [dict(answer["call"]) for answer in answers]  # type: ignore[call-overload]
    # an older pagedmla may know a name less
    names = list(dict.fromkeys(name for call in calls for name in call))
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, call in enumerate(calls):
            holders.setdefault(call.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            got = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items())
            raise InvalidArgument("ranks_differ", name, "the same on every rank of the group", got)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
