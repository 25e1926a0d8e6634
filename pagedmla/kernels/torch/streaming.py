"""One pass over a group of work items: keys stream through an online softmax, block by block.

Every block is read once for all the rows of its item, which are heads x query tokens.
"""

from __future__ import annotations

import torch

from pagedmla.kernels.torch.item_group import ItemGroup
from pagedmla.kernels.torch.pages import PageReader
from pagedmla.kernels.torch.scratch import Scratch
from pagedmla.kernels.torch.softmax_states import SoftmaxStates


def attend(
    group: ItemGroup,
    queries: torch.Tensor,
    value_width: int,
    max_rows: int,
    reader: PageReader,
    scratch: Scratch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends each item of ``group`` to its key range.

    Args:
        group: the items, those with the longest range first.
        queries: f32 [items, tokens * heads, head_dim_qk], every scale multiplied in.
        value_width: kv_lora_rank.
        max_rows: rows whose accumulators may be held at once, all blocks together (at least two blocks' in any case).
        reader: of the cache.
        scratch: memory for the pass.

    Returns:
        out f32 [items, tokens * heads, kv_lora_rank] and lse f32 [items, tokens * heads].
    """
    num_items, num_rows, _ = queries.shape
    places = min(group.num_blocks, max(2, max_rows // (num_items * num_rows)))
    states = SoftmaxStates(places, num_items, num_rows, value_width, scratch, queries.device)
    score_memory = scratch.take((num_items * num_rows * group.kv_block,))
    buffers = reader.buffers(scratch, num_items * group.kv_block)
    for number in range(group.num_blocks):
        keys = _read_block(group, number, reader, buffers)
        length = keys.shape[1]
        scores = score_memory[: num_items * num_rows * length].view(num_items, num_rows, length)
        torch.bmm(queries, keys.transpose(1, 2), out=scores)
        values = keys[..., :value_width]
        if group.rows_differ and group.hides_keys(number):
            values = _silence_non_finite(scores, values)
        group.mask(number, scores)
        states.take_in(scores, values)
    return states.finish()


def _read_block(
    group: ItemGroup, number: int, reader: PageReader, buffers: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """f32 [items, n, head_dim_qk]: the keys of block ``number``, zeros where an item owns none."""
    run = group.run(number)
    if run is not None:
        in_place = reader.view(*run)
        if in_place is not None:
            return in_place
    keys = reader.read(reader.locate(group.sequences[:, None], group.positions(number)), buffers)
    group.blank_dead_keys(number, keys)
    return keys


def _silence_non_finite(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Keeps a NaN or Inf value from the rows that do not see its key, whose weight for it is 0: 0 * NaN is NaN.

    The value becomes 0 and its key's scores NaN, which masking then takes from the rows that do not see it; those that do
    become NaN, as they must.  Neither changes a bit of any other number, so what is done here may depend on the values.
    """
    if bool(torch.isfinite(values.sum())):
        return values
    spoilt = ~torch.isfinite(values).all(-1)
    scores.masked_fill_(spoilt[:, None, :], torch.nan)
    return torch.where(spoilt[..., None], 0.0, values)
