"""The three errors a caller can meet, each saying whose fault it is.

Every one of them carries ``code`` (a stable word for programs), ``argument`` (the name at fault), ``wanted`` and ``got``,
and prints all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedmla.contract.support import Refusal


class PagedMLAError(Exception):
    """Base of the package's errors.

    Args:
        code: a stable, lower-case word that programs may branch on.
        argument: the name of the argument (or field) at fault.
        wanted: what would have been accepted, in words.
        got: what came, in words.
    """

    def __init__(self, code: str, argument: str, wanted: str, got: str) -> None:
        self.code = code
        self.argument = argument
        self.wanted = wanted
        self.got = got
        super().__init__(f"{argument}: wanted {wanted}, got {got} [{code}]")

    def __reduce__(self) -> tuple:
        # Exception pickles by its message alone, which is not this constructor's signature.
        return type(self), (self.code, self.argument, self.wanted, self.got)


def check_type(name: str, value: object, kind: type) -> None:
    """Raises InvalidArgument unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise InvalidArgument("type", name, f"a {kind.__name__}", type(value).__name__)


class InvalidArgument(PagedMLAError, ValueError):
    """The caller's mistake: no backend could ever do what was asked."""


class PlanMismatch(PagedMLAError, RuntimeError):
    """A plan was handed something else than it was made for."""


class Unsupported(PagedMLAError, NotImplementedError):
    """Valid by the contract, but not built for this backend and target.

    Attributes:
        refusals: every reason, not the first one only.
    """

    def __init__(
        self, code: str, argument: str, wanted: str, got: str, refusals: Iterable[Refusal] = ()
    ) -> None:
        super().__init__(code, argument, wanted, got)
        self.refusals = tuple(refusals)
        if len(self.refusals) > 1:
            self.args = ("; ".join(str(refusal) for refusal in self.refusals),)

    def __reduce__(self) -> tuple:
        return type(self), (self.code, self.argument, self.wanted, self.got, self.refusals)

    @classmethod
    def from_refusals(cls, refusals: Iterable[Refusal]) -> Unsupported:
        """Builds the error that reports all of ``refusals`` (at least one)."""
        reasons = tuple(refusals)
        first = reasons[0]
        return cls(first.code, first.argument, first.wanted, first.got, reasons)
