"""Other projects' decode kernels, called by their own conventions on our batches.

How each is found, loaded and called is in ``conformance.adapters``, once.  Nothing of theirs is shipped: a peer is an installed
package, or a file that the user placed in a folder.
"""

from __future__ import annotations

from pagedmla.bench.peers.peer import WITHOUT_LSE, AdapterPeer, Peer
from pagedmla.conformance.adapters import make_adapter
from pagedmla.contract.errors import InvalidArgument

PEER_NAMES = ("vllm_triton", "flash_mla", "fa3", "flashinfer_fa3", "flashinfer_fa2")


_CALLS = ("flash_mla", "flashinfer", "aiter")
"""Interfaces of other projects that a module may have, as ``flashinfer:module``; their adapters take ``return_lse``."""


def make_peer(name: str) -> Peer:
    """The peer called ``name``, not loaded yet.

    Args:
        name: out of ``PEER_NAMES``; ``module:function``, a function with ``pagedmla.decode``'s signature or an ``Adapter``; or
            ``flash_mla:module``, ``flashinfer:module``, ``aiter:module`` for a module with that project's interface.

    Raises:
        InvalidArgument: no peer has this name, or what ``module:function`` names cannot be used.
    """
    if name == "flash_mla":
        # vLLM's build of it, or DeepSeek's own package
        return AdapterPeer(make_adapter(name), make_adapter("flash_mla:flash_mla"))
    if name in PEER_NAMES:
        return AdapterPeer(make_adapter(name))
    prefix, colon, _ = name.partition(":")
    if not colon:
        wanted = "none, all or some of " + ", ".join(PEER_NAMES) + ", or module:function"
        raise InvalidArgument("peers", "peers", wanted, repr(name))
    try:
        adapter = make_adapter(name)
    except InvalidArgument as error:
        raise InvalidArgument(error.code, "peers", error.wanted, error.got) from error
    return AdapterPeer(adapter, options=WITHOUT_LSE if prefix in _CALLS else adapter.options[0])
