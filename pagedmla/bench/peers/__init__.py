"""Other projects' decode kernels, called by their own conventions on our batches.

How each is found, loaded and called is in ``conformance.adapters``, once.  Nothing of theirs is shipped: a peer is an installed
package, or a file that the user placed in a folder.
"""

from __future__ import annotations

from pagedmla.bench.peers.peer import AdapterPeer, Peer
from pagedmla.conformance.adapters import make_adapter
from pagedmla.contract.errors import InvalidArgument

PEER_NAMES = ("vllm_triton", "flash_mla", "fa3", "flashinfer_fa3", "flashinfer_fa2")


def make_peer(name: str) -> Peer:
    """The peer called ``name``, not loaded yet.

    Raises:
        InvalidArgument: no peer has this name.
    """
    if name not in PEER_NAMES:
        raise InvalidArgument("peers", "peers", "none, all or some of " + ", ".join(PEER_NAMES), repr(name))
    return AdapterPeer(make_adapter(name))
