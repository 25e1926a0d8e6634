"""Which Transformers this plug-in can work with, and the few facts that differ between those releases.

Facts are asked of the installed code wherever that is possible, so a release in between two tested ones is
not guessed at.
"""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from pagedmla.contract.errors import Unsupported

MINIMUM_VERSION = (5, 15)
"""First release whose models cache the latent and expand it in a method of its own, ``expand_kv``."""

CROP_KEEPS = "keeps"
CROP_REMOVES = "removes"
CROP_REFUSES = "refuses"


def require_transformers(version: str | None = None) -> None:
    """Raises unless the installed Transformers has the seam that this plug-in stands on.

    Args:
        version: judged instead of the installed release; for tests.

    Raises:
        Unsupported: Transformers is missing or older than 5.15.
    """
    wanted = "transformers >= 5.15, which caches the latent (pip install 'pagedmla[transformers]')"
    if version is None:
        try:
            import transformers
        except ImportError as error:
            raise Unsupported(
                "transformers_missing", "transformers", wanted, "none that can be imported"
            ) from error
        version = transformers.__version__
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_VERSION:
        raise Unsupported("transformers_version", "transformers", wanted, f"transformers {version}")


@lru_cache(maxsize=1)
def meaning_of_positive_crop() -> str:
    """What ``cache.crop(n)`` with a positive ``n`` means in the installed release.

    Up to 5.17 it is the length to keep (deprecated), later it is refused.  A layer of the library is asked,
    so that our caches answer as its own do.

    Returns:
        ``CROP_KEEPS``, ``CROP_REMOVES`` or ``CROP_REFUSES``.
    """
    from transformers.cache_utils import DynamicLayer

    layer = DynamicLayer()
    tokens = torch.zeros(1, 1, 3, 1)
    layer.update(tokens, tokens)
    try:
        layer.crop(1)
    except (ValueError, RuntimeError):
        return CROP_REFUSES
    return CROP_KEEPS if layer.get_seq_length() == 1 else CROP_REMOVES
