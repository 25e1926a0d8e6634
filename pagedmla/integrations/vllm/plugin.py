"""What vLLM calls when it starts: ``register`` puts our backend behind vLLM's name CUSTOM."""

from __future__ import annotations

import logging

from pagedmla.integrations.vllm.versions import installed_version, refusal_of_version

BACKEND_PATH = "pagedmla.integrations.vllm.backend.PagedMLABackend"
"""Where vLLM finds the backend.  It imports the module when somebody asks for CUSTOM, and not before."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers the backend, or says in one line why not.

    vLLM calls it in every process, some more than once.  It imports nothing heavy, touches no device, and chooses nothing: the
    backend is used where a user says ``--attention-backend CUSTOM``.
    """
    refusal = refusal_of_version(installed_version())
    if refusal is not None:
        logger.warning("pagedmla is not registered as an attention backend: %s", refusal)
        return
    from vllm.v1.attention.backends.registry import (  # type: ignore[import-not-found]
        AttentionBackendEnum,
        register_backend,
    )

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND_PATH:
        # there is one such name for all plug-ins, and the order in which they load is not the user's choice
        logger.warning(
            "pagedmla is not registered as an attention backend: CUSTOM: wanted a free name, got one that "
            "stands for %s; VLLM_PLUGINS=pagedmla loads this plug-in alone [custom_taken]",
            custom.get_path(),
        )
        return
    register_backend(custom, BACKEND_PATH)
