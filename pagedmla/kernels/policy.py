"""Which tile sizes a kernel runs with: a rule from problem and target to a frozen record.  Nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

from pagedmla.contract.problem import DecodeProblem

_ROWS_OF_A_TILE = 16


@dataclass(frozen=True)
class TorchDecodeConfig:
    """Tile sizes of the torch backend.

    Attributes:
        kv_tokens_per_pass: tokens of all work items that are copied out of their pages at once.  4,096 tokens of 576
            float32 numbers are 9 MiB.  Half of that would fit a core's outer cache better, and was slower: with few rows
            the fixed cost of some ten torch operations a block is more than what the cache saves.
        max_kv_block: most tokens of one item in a block; longer sequences stream.
        min_kv_block: fewest; below 64 the fixed cost of a torch operation is most of the time.
        max_rows_per_pass: query rows (tokens x heads x splits x blocks not yet united) whose accumulators are held at once:
            8,192 x 512 float32 numbers are 16 MiB.
        max_scores_per_pass: numbers of the score matrix, 16 MiB of float32.
        max_rows_per_item: rows of one work item; longer queries are cut, and read the keys again for each cut.
        invariant_kv_block: tokens of a step in batch-invariant mode, whatever the batch.
        invariant_rows: rows of a matrix product in batch-invariant mode, whatever the batch: missing ones are zeros.
        invariant_blocks_united: blocks whose states are united at a time in batch-invariant mode, counted from the
            sequence's start.
    """

    kv_tokens_per_pass: int = 4096
    max_kv_block: int = 4096
    min_kv_block: int = 64
    max_rows_per_pass: int = 8192
    max_scores_per_pass: int = 4 * 1024 * 1024
    max_rows_per_item: int = 2048
    invariant_kv_block: int = 256
    invariant_rows: int = _ROWS_OF_A_TILE
    invariant_blocks_united: int = 8

    def query_tokens_per_item(self, num_heads: int) -> int:
        """Query tokens of one work item, at least one however many heads there are."""
        return max(1, self.max_rows_per_item // num_heads)

    def items_per_pass(self, rows_per_item: int, longest: int) -> int:
        """Work items of up to ``longest`` tokens that fit a pass, at least one."""
        shortest_block = max(self.min_kv_block, min(longest, self.max_kv_block))
        by_tokens = self.kv_tokens_per_pass // shortest_block
        by_scores = self.max_scores_per_pass // (rows_per_item * shortest_block)
        # two blocks' accumulators at least: what came before, and the block at hand
        by_rows = self.max_rows_per_pass // (2 * rows_per_item)
        return max(1, min(by_tokens, by_scores, by_rows))

    def kv_blocks(self, num_items: int, rows_per_item: int, longest: int) -> tuple[int, int]:
        """(tokens of each item in one block, number of blocks) of a pass whose longest item has ``longest`` tokens.

        Blocks are evened out, so that the last one is hardly ever shorter than the others.
        """
        by_tokens = self.kv_tokens_per_pass // num_items
        by_scores = self.max_scores_per_pass // (num_items * rows_per_item)
        most = min(self.max_kv_block, max(self.min_kv_block, min(by_tokens, by_scores)))
        num_blocks = max(1, -(-longest // most))
        return max(1, -(-longest // num_blocks)), num_blocks


def torch_decode_config(problem: DecodeProblem, on_cpu: bool) -> TorchDecodeConfig:
    """The torch backend's tile sizes for ``problem`` on a CPU, or on an accelerator."""
    if on_cpu:
        return TorchDecodeConfig()
    # an accelerator wants more work in a launch; this is about 200 MB of intermediates for 512 + 64
    return TorchDecodeConfig(
        kv_tokens_per_pass=16384, max_rows_per_pass=16384, max_scores_per_pass=16 * 1024 * 1024
    )


def split_count(num_units: int, longest: int, parallel_units: int, smallest_split: int = 512) -> int:
    """Parts that each sequence's keys are cut into when the caller leaves it open.

    Splits only exist to fill the machine: with as many work units as it has, one part is right.  A part is never shorter
    than ``smallest_split`` tokens, or its share of the fixed costs outweighs what it brings.

    Args:
        num_units: independent (sequence, query tile) pairs.
        longest: keys of the longest one, tokens.
        parallel_units: threads of a CPU, compute units of a GPU.
        smallest_split: tokens.
    """
    if num_units < 1 or num_units >= parallel_units:
        return 1
    return max(1, min(-(-parallel_units // num_units), longest // smallest_split))
