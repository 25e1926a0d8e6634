"""Where an implementation's software is looked for, and what other projects' code raises."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

PEER_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    subprocess.SubprocessError,  # FlashInfer compiles when first called
)
"""What other projects' code raises for what it does not take; ``peer_errors`` adds Triton's own."""


@dataclass(frozen=True)
class Software:
    """A file of another project.

    Attributes:
        path: where it lies.
        version: the package's, or the beginning of the file's SHA-256 where nothing tells.
        installed: it is part of an installed package.
    """

    path: Path
    version: str
    installed: bool


def find_software(package: str, in_package: Sequence[str], folder: Path | None) -> Software | str:
    """A file of ``package``: out of ``folder`` when that has it, else of the installed package.

    Args:
        package: the top-level module; it is not imported.
        in_package: where the file may lie below the package's folder; in ``folder`` the last part of each counts too.
        folder: the user's folder of peers, or None.

    Returns:
        The file, or why there is none.
    """
    for inside in in_package:
        for candidate in (inside, f"{package}/{inside}", Path(inside).name):
            if folder is not None and (folder / candidate).is_file():
                return Software(folder / candidate, _version_in(folder, package, folder / candidate), False)
    where = "" if folder is None else f", and none of {', '.join(in_package)} is in the folder of peers"
    spec = importlib.util.find_spec(package)
    if spec is None:
        return f"{package} is not installed{where or ', and no folder of peers is given'}"
    for root in spec.submodule_search_locations or ():
        for inside in in_package:
            if (Path(root) / inside).is_file():
                return Software(Path(root) / inside, f"{package} {_installed_version(package)}", True)
    return f"{package} {_installed_version(package)} is installed without {' or '.join(in_package)}{where}"


def import_software(module: str, folder: Path | None) -> ModuleType | str:
    """Imports ``module``, installed or out of ``folder``, which then goes to the end of the module path for good: the
    software's own later imports need it.

    Returns:
        The module, or why it does not load.
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    package = module.split(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == package:
            return f"{package} is not installed, and not in a folder of peers"
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return f"{package} has no module {error.name}"
        return f"{package} needs {error.name}, which is not installed"
    except PEER_ERRORS as error:
        return f"{package} does not load: {first_line(error)}"


def version_of(module: str) -> str:
    """Name and version of the package that the imported ``module`` is in."""
    package = module.split(".")[0]
    version = getattr(sys.modules[package], "__version__", None)
    return f"{package} {version or _installed_version(package)}"


def load_library(path: Path) -> str | None:
    """Registers the operations of a shared library; returns why that failed, or None."""
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return f"{path.name} does not load: {first_line(error)}"
    return None


def peer_errors() -> tuple[type[Exception], ...]:
    """``PEER_ERRORS`` with the base of Triton's errors, where Triton is installed."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return PEER_ERRORS
    return (*PEER_ERRORS, TritonError)


def first_line(error: BaseException) -> str:
    """The first line of what ``error`` says, with its kind when it says nothing."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def _version_in(folder: Path, package: str, file: Path) -> str:
    for found in sorted(folder.glob(f"{package}-*.dist-info")):
        return found.name.removesuffix(".dist-info").replace("-", " ", 1)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return f"{package}, file {digest[:12]}"
