"""Other projects' decode kernels, called by their own conventions on our batches.

Nothing of theirs is shipped: a peer is an installed package, or a file that the user placed in a folder.
"""

from __future__ import annotations

from pagedmla.bench.peers.fa3 import FlashAttention3
from pagedmla.bench.peers.flash_mla import FlashMLA
from pagedmla.bench.peers.flashinfer import FlashInfer
from pagedmla.bench.peers.peer import Peer
from pagedmla.bench.peers.vllm_triton import VLLMTriton
from pagedmla.contract.errors import InvalidArgument

PEER_NAMES = ("vllm_triton", "flash_mla", "fa3", "flashinfer_fa3", "flashinfer_fa2")


def make_peer(name: str) -> Peer:
    """The peer called ``name``, not loaded yet.

    Raises:
        InvalidArgument: no peer has this name.
    """
    if name == "vllm_triton":
        return VLLMTriton()
    if name == "flash_mla":
        return FlashMLA()
    if name == "fa3":
        return FlashAttention3()
    if name in ("flashinfer_fa3", "flashinfer_fa2"):
        return FlashInfer(name.removeprefix("flashinfer_"))
    raise InvalidArgument("peers", "peers", "none, all or some of " + ", ".join(PEER_NAMES), repr(name))
