"""Which releases of vLLM the plug-in is for."""

from __future__ import annotations

import re
from importlib import metadata

OLDEST, NEWEST = (0, 21), (0, 33)
"""First and last (major, minor) whose attention interfaces were read: the classes, their signatures and what calls them.
Releases that lie between read ones are taken as well."""


def installed_version() -> str | None:
    """The installed vLLM's version, read without importing it; None where there is none."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def refusal_of_version(version: str | None) -> str | None:
    """Why the plug-in stays out of this vLLM, in one line, or None.

    Args:
        version: as ``installed_version`` gives it.
    """
    wanted = f"vllm {_text(OLDEST)} to {_text(NEWEST)}"
    if version is None:
        return f"vllm: wanted {wanted}, got none that is installed [vllm_missing]"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return f"vllm: wanted {wanted}, got vllm {version} [vllm_version]"
    return None


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
