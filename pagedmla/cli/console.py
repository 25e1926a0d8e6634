"""How the commands speak of a user's mistake: one line on stderr and exit status 2, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer

from pagedmla.contract.errors import PagedMLAError

if TYPE_CHECKING:
    import torch

EXIT_FAILED = 1
"""A check ran and did not pass."""
EXIT_USAGE = 2
"""What was asked for cannot be done: an argument, a file or a package is not what it must be."""

_EXTRAS = {"transformers": "transformers", "safetensors": "transformers", "tokenizers": "transformers"}


def fail(message: str) -> NoReturn:
    """Prints ``message`` on one line of stderr and ends the command with status 2."""
    typer.echo("pagedmla: " + " ".join(message.split()), err=True)
    raise typer.Exit(EXIT_USAGE)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns the package's own errors, and a missing optional package, into one line and exit status 2."""
    try:
        yield
    except PagedMLAError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _EXTRAS:
            raise
        fail(f"this command needs {package}: pip install 'pagedmla[{_EXTRAS[package]}]'")


def usable_device(name: str | None) -> torch.device:
    """The torch device called ``name``, tried out; None is CUDA if there is one, else the CPU.

    Raises:
        InvalidArgument: there is no such device on this machine.
    """
    import torch

    from pagedmla.contract.errors import InvalidArgument
    from pagedmla.contract.target import Target

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    Target.detect(name)
    device = torch.device(name)
    try:
        # torch reports a device type that it was built without as AssertionError, and others as the two below
        torch.zeros(1, device=device).item()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgument(
            "device", "device", "a device of this machine, such as cpu", f"{name} ({reason})"
        ) from error
    return device
