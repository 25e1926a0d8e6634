"""Which backend runs a call: the support table's best for its problem that can also read its tensors.

A backend may take a problem and not every layout of the cache (``kernels.Choosy``).  Where none was named, the next best runs
then; a named one is refused with the argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pagedmla import kernels
from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.errors import Unsupported
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.support import Refusal, choose_backend
from pagedmla.contract.target import Target


def backend_for(args: DecodeArguments, problem: DecodeProblem, target: Target, backend: str | None) -> str:
    """The backend that runs a call: ``backend`` itself when named, else the best.

    Args:
        args: checked.
        problem: theirs.
        target: the tensors' device.
        backend: a name, or None.

    Raises:
        InvalidArgument: no backend has this name.
        Unsupported: it is refused, with every reason.
    """
    passed_over: tuple[Refusal, ...] = ()
    while True:
        name = choose_backend(problem, target, backend, passed_over)
        refusal = kernels.refusal_of_tensors(name, args)
        if refusal is None:
            return name
        if backend is not None:
            raise Unsupported.from_refusals([refusal])
        passed_over += (refusal,)


def workspace_bytes(problem: DecodeProblem, bounds: BatchBounds, target: Target, backend: str | None) -> int:
    """Bytes of workspace for every call within ``bounds``, whichever backend it leads to.

    Raises:
        InvalidArgument: no backend has this name.
        Unsupported: the problem is refused, with every reason.
    """
    names = set(_may_run(problem, target, backend))
    if backend is None:
        # ragged queries of which a call does not say the longest: any sequence may have all of them
        ragged = replace(problem, max_q_len=max(problem.max_q_len, bounds.num_tokens(problem)))
        names.update(_may_run(ragged, target, None))
    return max(kernels.load(name).workspace_size(problem, bounds, target) for name in names)


def _may_run(problem: DecodeProblem, target: Target, backend: str | None) -> Iterator[str]:
    """The backend that is chosen for ``problem``, and where none is named, those that it may be left to for its tensors."""
    passed_over: tuple[Refusal, ...] = ()
    yield (name := choose_backend(problem, target, backend))
    while backend is None and kernels.is_choosy(name):
        passed_over += (Refusal(name, "strides", "kv_cache", "some strides", "others"),)
        try:
            yield (name := choose_backend(problem, target, None, passed_over))
        except Unsupported:
            # nobody else takes it, and a call with such tensors is refused
            return
