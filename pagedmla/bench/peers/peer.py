"""What a peer is, and how an adapter of the conformance kit is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from pagedmla.bench.batch import SOFTMAX_SCALE, DecodeBatch
from pagedmla.bench.shapes import KV_LORA_RANK
from pagedmla.conformance.adapters.adapter import Adapter, Options
from pagedmla.conformance.adapters.software import first_line, peer_errors
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import DTYPES, BatchSpec

__all__ = ["WITHOUT_LSE", "AdapterPeer", "Peer", "call_of", "first_line", "peer_errors"]

WITHOUT_LSE: Options = {"return_lse": False}
"""An engine's decode step has no use for lse; what it costs to bring it into our shape is not the peer's time."""


class Peer(Protocol):
    """Another project's decode.

    Attributes:
        name: the word that ``--peers`` takes.
        version: of the software that was found; empty before ``load``.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def load(self, folder: Path | None) -> str | None:
        """Loads the software, installed or out of ``folder``; returns why it is not here, or None."""

    def supports(self, batch: DecodeBatch) -> str | None:
        """Why the peer does not take the batch, or None."""

    def prepare(self, batch: DecodeBatch) -> Callable[[], Tensor]:
        """A decode of ``batch`` without arguments; returns out [num_tokens, num_heads, 512] and may be captured in a graph.

        Plans and metadata are made here: they are not part of the time.
        """


class AdapterPeer:
    """An implementation, as the conformance kit calls it."""

    def __init__(
        self, adapter: Adapter, other: Adapter | None = None, options: Options = WITHOUT_LSE
    ) -> None:
        """Args:
        adapter: how it is called.
        other: how it is called where ``adapter`` does not load: the same kernels as another project ships them.
        options: what ``prepare`` of the adapter is asked.
        """
        self._name, self._adapter, self._other, self._options = adapter.name, adapter, other, options

    @property
    def name(self) -> str:
        """The adapter's, the first one's where there are two."""
        return self._name

    @property
    def version(self) -> str:
        """Of the software that was found; empty before ``load``."""
        return self._adapter.version

    def load(self, folder: Path | None) -> str | None:
        """See ``Peer``."""
        reason = self._adapter.load(folder)
        if reason is None or self._other is None:
            return reason
        other_reason = self._other.load(folder)
        if other_reason is None:
            self._adapter = self._other
            return None
        return f"{reason}; {other_reason}"

    def supports(self, batch: DecodeBatch) -> str | None:
        """See ``Peer``."""
        return self._adapter.refuses(_spec_of(batch), self._options, batch.device)

    def prepare(self, batch: DecodeBatch) -> Callable[[], Tensor]:
        """See ``Peer``."""
        prepared = self._adapter.prepare(call_of(batch), self._options)
        return lambda: prepared.run()[0]


def call_of(batch: DecodeBatch) -> Call:
    """``batch`` as the conformance kit hands one to an adapter; the tensors are the same."""
    return Call(
        q=batch.q,
        kv_cache=batch.kv_cache,
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=None,
        softmax_scale=SOFTMAX_SCALE,
        causal=True,
        kv_lora_rank=KV_LORA_RANK,
        q_scale=None,
        kv_scale=None,
        spec=_spec_of(batch),
    )


def _spec_of(batch: DecodeBatch) -> BatchSpec:
    """Its plain numbers; a ``BatchSpec`` also tells how values are drawn, which here they were not."""
    shape, names = batch.shape, {dtype: name for name, dtype in DTYPES.items()}
    return BatchSpec(
        seq_lens=tuple(shape.seq_lens),
        q_lens=(shape.q_len,) * shape.num_seqs,
        num_heads=shape.num_heads,
        page_size=batch.page_size,
        dtype=names[batch.q.dtype],
        kv_dtype=names[batch.kv_cache.dtype],
        softmax_scale=SOFTMAX_SCALE,
    )
