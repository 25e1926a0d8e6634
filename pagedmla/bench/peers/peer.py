"""What a peer is, and where its software is looked for."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pagedmla.bench.batch import DecodeBatch

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


class Peer(Protocol):
    """Another project's decode.

    Attributes:
        name: the word that ``--peers`` takes.
        version: of the software that was found; empty before ``load``.
    """

    name: str
    version: str

    def load(self, folder: Path | None) -> str | None:
        """Loads the software, installed or out of ``folder``; returns why it is not here, or None."""

    def supports(self, batch: DecodeBatch) -> str | None:
        """Why the peer does not take the batch, or None."""

    def prepare(self, batch: DecodeBatch) -> Callable[[], Tensor]:
        """A decode of ``batch`` without arguments; returns out [num_tokens, num_heads, 512] and may be captured in a graph.

        Plans and metadata are made here: they are not part of the time.
        """


@dataclass(frozen=True)
class Software:
    """A file of a peer.

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


def load_library(path: Path) -> str | None:
    """Registers the operations of a shared library; returns why that failed, or None."""
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return f"{path.name} does not load: {first_line(error)}"
    return None


def needs_hopper(batch: DecodeBatch) -> str | None:
    """Why a peer of Hopper kernels for 16-bit numbers does not take ``batch``, or None."""
    if batch.target.arch != "sm_90":
        return f"takes sm_90, not {batch.target.arch}"
    return needs_16_bits(batch)


def needs_16_bits(batch: DecodeBatch) -> str | None:
    """Why a peer of CUDA kernels for 16-bit numbers does not take ``batch``, or None."""
    if batch.device.type != "cuda":
        return f"takes CUDA devices, not {batch.device.type}"
    if batch.q.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, not {batch.q.dtype}"
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
