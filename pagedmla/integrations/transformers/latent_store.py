"""The pages themselves: one pool a layer, all of them addressed by the same table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.integrations.transformers.sequence_table import Appended, SequenceTable
from pagedmla.paging import kv_cache


@dataclass(frozen=True)
class DeviceStep:
    """A step's metadata on one device.

    Attributes:
        slot_mapping: i64 [num_rows * num_new], -1 for padding.
        row_table: i32 [num_rows, max_pages].
        row_lens: i32 [num_rows], stored tokens, the new ones included.
        block_table, seq_lens: what the kernel is called with.  The same as the row tensors, except where the new tokens hold
            padding: then every token is a sequence of its own, i32 [num_rows * num_new, ...], as long as what it sees.
            Either way all sequences have the same number of queries, so no cu_seqlens_q is needed.
    """

    slot_mapping: torch.Tensor
    row_table: torch.Tensor
    row_lens: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


class PagedStep:
    """What one forward adds to the cache and what each of its tokens sees; made once, handed to every layer.

    Attributes:
        num_rows, num_new: the shape of the new tokens.
        lengths: stored tokens of each row, the new ones included.
        max_length: the largest of them.
        shown_length: tokens shown to each row so far, padding included.
        has_padding: whether some of the new tokens are padding.
        is_first: whether nothing was stored before.
    """

    def __init__(
        self, table: SequenceTable, appended: Appended, num_new: int, has_padding: bool, is_first: bool
    ) -> None:
        self.num_rows, self.num_new = table.num_rows, num_new
        self.lengths, self.max_length = list(table.lengths), table.max_length
        self.shown_length = table.shown_length
        self.has_padding, self.is_first = has_padding, is_first
        self._slot_mapping, self._visible = appended.slot_mapping, appended.visible
        self._block_table, self._real = table.block_table(), table.real
        self._written: set[int] = set()
        self._devices: dict[torch.device, DeviceStep] = {}
        self._visible_on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> DeviceStep:
        """The step's tensors on ``device``, copied there the first time."""
        if device not in self._devices:
            slots, row_table = self._slot_mapping.to(device), self._block_table.to(device)
            row_lens = torch.tensor(self.lengths, dtype=torch.int32, device=device)
            block_table, seq_lens = row_table, row_lens
            if self.has_padding:
                block_table = row_table.repeat_interleave(self.num_new, dim=0)
                seq_lens = self.visible_on(device).reshape(-1)
            self._devices[device] = DeviceStep(slots, row_table, row_lens, block_table, seq_lens)
        return self._devices[device]

    def visible_on(self, device: torch.device) -> torch.Tensor:
        """i32 [num_rows, num_new]: how many stored tokens of its row each new token sees."""
        if device not in self._visible_on:
            self._visible_on[device] = self._visible.to(device)
        return self._visible_on[device]

    def stored_positions(self, device: torch.device) -> torch.Tensor:
        """i64 [num_rows, max_length]: the shown position of each stored token; past a row's end, any."""
        if self._real is None:
            return torch.arange(self.max_length, device=device).expand(self.num_rows, -1)
        # stable: real tokens first, in the order in which they were stored
        order = torch.argsort((~self._real).to(torch.int8), dim=1, stable=True)
        return order[:, : self.max_length].to(device)

    def was_written_by(self, layer: int) -> bool:
        """Whether ``layer`` has stored its new tokens."""
        return layer in self._written

    def mark_written(self, layer: int) -> None:
        """Notes that ``layer`` stores its new tokens now.

        Raises:
            Unsupported: it did before, in the same forward.
        """
        if layer in self._written:
            wanted = "one attention call of a cached layer in a forward"
            raise Unsupported("layer_repeated", "cache", wanted, f"a second call of layer {layer}")
        self._written.add(layer)


class LatentStore:
    """The sequence table and every layer's pool [num_pages, page_size, kv_lora_rank + qk_rope_head_dim].

    Args:
        page_size: tokens in a page.
        num_pages: pages to begin with.
    """

    def __init__(self, page_size: int, num_pages: int = 0) -> None:
        self.table = SequenceTable(page_size, num_pages)
        self.pools: dict[int, torch.Tensor] = {}
        # the last step that was begun without a mask object of ours to live in
        self._open_step: PagedStep | None = None

    def begin_step(self, num_rows: int, num_new: int, attention_mask: torch.Tensor | None) -> PagedStep:
        """Gives the new tokens their slots, in all layers at once.

        Args:
            num_rows, num_new: the shape of the new tokens.
            attention_mask: bool [num_rows, shown tokens, the new ones included], or None when there is no
                padding.  It is read on the host, once.

        Raises:
            InvalidArgument: another batch size than the cache's, or a mask that is too narrow.
            Unsupported: a mask that says otherwise than before about tokens shown earlier.
        """
        table = self.table
        is_first = table.max_length == 0
        real = self._read_mask(attention_mask, num_rows, num_new)
        appended = table.append(num_rows, num_new, real)
        self._copy_pages(appended.page_copies)
        return PagedStep(table, appended, num_new, real is not None, is_first)

    def open_step(self, layer: int, num_rows: int, num_new: int, num_keys: int | None = None) -> PagedStep:
        """The step of a forward whose mask is not an object of ours (a ready-made 4D mask): nothing in it is padding.

        A layer that has written already begins the next forward.

        Args:
            layer: index of the layer that asks.
            num_rows, num_new: the shape of its new tokens.
            num_keys: keys that the mask covers; None: all, since there is no mask.

        Raises:
            InvalidArgument: a mask that does not cover the cached and the new tokens.
        """
        step = self._open_step
        fits = step is not None and (step.num_rows, step.num_new) == (num_rows, num_new)
        if step is None or not fits or step.was_written_by(layer) or step.lengths != self.table.lengths:
            seen = self.table.shown_length
            if num_keys is not None and num_keys < seen + num_new:
                wanted = f"a mask over {seen} tokens in the cache and {num_new} new ones"
                raise InvalidArgument("attention_mask", "attention_mask", wanted, f"one over {num_keys} keys")
            step = self._open_step = self.begin_step(num_rows, num_new, None)
        return step

    def write(
        self, layer: int, step: PagedStep, latent: torch.Tensor, rope: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Stores a step's new tokens in ``layer``'s pool and returns the pool.

        Args:
            layer: index of the layer.
            step: from ``begin_step``.
            latent: [num_rows, 1, num_new, kv_lora_rank].
            rope: [num_rows, 1, num_new, qk_rope_head_dim]; may be 0 wide.
            dtype: the pool's, fixed by the first write.

        Raises:
            InvalidArgument: another latent size, dtype or device than this layer's pool has.
        """
        step.mark_written(layer)
        pool = self._pool(layer, latent, rope, dtype)
        k_pe = rope.reshape(-1, rope.shape[-1]) if rope.shape[-1] else None
        kv_cache.append(pool, latent.reshape(-1, latent.shape[-1]), k_pe, step.on(pool.device).slot_mapping)
        return pool

    def gather(self, layer: int, step: PagedStep) -> torch.Tensor:
        """[num_rows, max_length, kv_lora_rank + qk_rope_head_dim] out of ``layer``'s pages; zeros past a row's end."""
        pool = self.pools[layer]
        here = step.on(pool.device)
        # a cell past a row's end is -1: any page will do, its tokens are blanked below
        pages = pool[here.row_table.clamp(min=0).to(torch.int64)].flatten(1, 2)[:, : step.max_length]
        if min(step.lengths) == step.max_length:
            return pages
        beyond = torch.arange(step.max_length, device=pool.device) >= here.row_lens.unsqueeze(1)
        return pages.masked_fill(beyond.unsqueeze(-1), 0)

    def reset(self) -> None:
        """Forgets every token; the pools stay allocated."""
        self.table.reset()
        self._open_step = None

    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers that were written so far."""
        return sum(pool.shape[-1] * pool.element_size() for pool in self.pools.values())

    def bytes_used(self) -> int:
        """Bytes of the tokens stored, in all layers; what rows share counts once."""
        return self.table.num_stored_tokens * self.bytes_per_token()

    def bytes_allocated(self) -> int:
        """Bytes of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in self.pools.values())

    def _read_mask(
        self, attention_mask: torch.Tensor | None, num_rows: int, num_new: int
    ) -> torch.Tensor | None:
        if attention_mask is None:
            return None
        seen = self.table.shown_length
        if attention_mask.shape[0] != num_rows or attention_mask.shape[1] < seen + num_new:
            wanted = f"[{num_rows}, {seen} tokens in the cache + {num_new} new ones]"
            raise InvalidArgument("attention_mask", "attention_mask", wanted, str(list(attention_mask.shape)))
        mask = attention_mask[:, : seen + num_new].to("cpu", torch.bool)
        before, recorded = mask[:, :seen], self.table.real
        if not (bool(before.all()) if recorded is None else torch.equal(before, recorded)):
            wanted = "the same padding for the tokens in the cache as when they were stored"
            raise Unsupported("attention_mask_changed", "attention_mask", wanted, "another one")
        new = mask[:, seen:]
        return None if bool(new.all()) else new

    def _pool(self, layer: int, latent: torch.Tensor, rope: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        pool = self.pools.get(layer)
        rank, rope_dim = latent.shape[-1], rope.shape[-1]
        if pool is not None:
            was = (pool.shape[2], pool.dtype, pool.device)
            now = (rank + rope_dim, dtype, latent.device)
            if was != now:
                wanted = f"{was[0]} numbers of {was[1]} on {was[2]} a token, as layer {layer} holds"
                raise InvalidArgument("latent", "cache", wanted, f"{now[0]} of {now[1]} on {now[2]}")
        if pool is None or pool.shape[0] < self.table.allocator.num_pages:
            pool = self._grown(pool, rank, rope_dim, dtype, latent.device)
            self.pools[layer] = pool
        return pool

    def _grown(
        self, pool: torch.Tensor | None, rank: int, rope_dim: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # an ordinary tensor even inside inference_mode: the cache outlives it and is written in place
        # afterwards
        with torch.inference_mode(False), torch.no_grad():
            larger = kv_cache.allocate(
                self.table.allocator.num_pages,
                self.table.page_size,
                kv_lora_rank=rank,
                qk_rope_head_dim=rope_dim,
                layout=layout_of_dtype(dtype).name,
                device=device,
            )
            if pool is not None:
                larger[: pool.shape[0]] = pool
        return larger

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        sources, targets = zip(*copies, strict=True)
        for layer, pool in self.pools.items():
            if pool.shape[0] < self.table.allocator.num_pages:
                pool = self._grown(pool, pool.shape[2], 0, pool.dtype, pool.device)
                self.pools[layer] = pool
            pool[torch.tensor(targets, device=pool.device)] = pool[torch.tensor(sources, device=pool.device)]
