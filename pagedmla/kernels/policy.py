"""Which tile sizes a kernel runs with: a rule from problem and target to a frozen record.  Nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.rules_triton import padded
from pagedmla.contract.target import KNOWN_TARGETS, Target

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


class TileConfig(Protocol):
    """What the work plan and its workspace (``kernels.split_kv``) ask of a kernel's config; see ``TritonDecodeConfig``."""

    def __hash__(self) -> int: ...
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def programs_per_compute_unit(self) -> int: ...
    @property
    def overlapped_launches(self) -> bool: ...
    @property
    def invariant_split(self) -> int: ...


@dataclass(frozen=True)
class TritonDecodeConfig:
    """Tile sizes of the Triton decode kernels.

    Attributes:
        block_m: rows (query token, head) of a row tile.
        block_n: tokens of a KV tile.
        keys_on_m: the KV tile is on the matrix unit's M side.
        num_warps: warps (wavefronts) of a program.
        num_stages: stages of the software pipeline over KV tiles.
        programs_per_compute_unit: programs that fit one at a time, so that a persistent grid is resident at once.
        overlapped_launches: a kernel is launched while the one before it still runs, and waits for its end by itself.
        invariant_split: tokens of a split in batch-invariant mode; fixed, so that a row's cuts depend on nothing else.
    """

    block_m: int
    block_n: int
    keys_on_m: bool
    num_warps: int
    num_stages: int
    programs_per_compute_unit: int
    overlapped_launches: bool = False
    invariant_split: int = 2048


@dataclass(frozen=True)
class TritonMergeConfig:
    """Tile sizes of the kernel that unites partial states.

    Attributes:
        block_rows, block_columns: numbers of a program.
        block_pieces: pieces that are read at a time.
        in_order: one piece after the other is added; otherwise a program has one row, and adds its pieces as a tree.
        num_warps: warps of a program.
    """

    block_rows: int
    block_columns: int
    block_pieces: int
    in_order: bool
    num_warps: int = 4


CAUSAL_END_BLOCK_N = 32
"""Tokens of a KV tile, at most, where rows of a row tile differ in what they see: such a tile passes through registers."""

# Tuned values: for each family of targets, (most rows of a sequence, config); the first that has room is taken.
TRITON_DECODE_CONFIGS: dict[str, tuple[tuple[int, TritonDecodeConfig], ...]] = {
    # Measured on one H200 (docs/performance.md).  16 rows: three KV tiles in flight in one program a multiprocessor beat two
    # tiles each in two programs.  64 rows, the least that the warpgroup instruction takes: accumulators are half the
    # registers of 8 warps, the query takes 72 KiB of shared memory, two KV tiles the rest.  17 to 32 rows are faster in it,
    # half empty, than in tiles of 32 rows, which only the older instruction takes (132 us against 146 at B64 S4096 H32).
    "sm_90": (
        (16, TritonDecodeConfig(16, 64, False, 4, 3, 1, True)),
        (1 << 30, TritonDecodeConfig(64, 64, False, 8, 2, 1, True)),
    ),
    # The rows from here to "other" are compiled, not run: the largest tiles of which the compiler keeps the loop over whole KV
    # tiles in registers, spilling none or a few bytes (`pagedmla compile`; docs/targets.md has the figures).
    # A tile of 64 tokens spills with 16 rows and 4 warps; 32 in two stages need 55 KiB: two programs share a multiprocessor.
    # 64 rows, of which the query alone is 72 KiB, leave room for two tiles of 32 tokens, and 136 of 163 KiB go in all.
    "sm_80": (
        (16, TritonDecodeConfig(16, 32, False, 4, 2, 2)),
        (32, TritonDecodeConfig(32, 32, False, 8, 2, 1)),
        (1 << 30, TritonDecodeConfig(64, 32, False, 8, 2, 1)),
    ),
    # 99 KiB: 32 rows and 32 tokens need 100 KiB in the causal end, 64 rows and 16 tokens 104
    "sm_89": (
        (16, TritonDecodeConfig(16, 32, False, 4, 2, 1)),
        (1 << 30, TritonDecodeConfig(32, 16, False, 8, 2, 1)),
    ),
    # 64 rows go through tensor memory, whose way back to registers spills 600 bytes and more a thread, and with 64 tokens
    # need 281 KiB; 32 rows take the older matrix instruction.  93 KiB of 227 leave room for a second program of 16 rows.
    "sm_100": (
        (16, TritonDecodeConfig(16, 32, False, 4, 3, 2)),
        (1 << 30, TritonDecodeConfig(32, 32, False, 8, 2, 1)),
    ),
    # 64 KiB of LDS.  Four wavefronts of 64 lanes may use 512 registers a lane each, eight only 256, and nearly all spill.
    # One stage: a second one's tiles come out of the registers, and spill.  64 rows: the query alone fills the LDS.
    "gfx942": (
        (16, TritonDecodeConfig(16, 32, False, 4, 1, 1)),
        (32, TritonDecodeConfig(32, 16, False, 4, 1, 1)),
        (1 << 30, TritonDecodeConfig(64, 16, False, 4, 1, 1)),
    ),
    # the same with loads that go to LDS directly: a second stage costs no registers
    "gfx950": (
        (16, TritonDecodeConfig(16, 32, False, 4, 2, 1)),
        (32, TritonDecodeConfig(32, 16, False, 4, 2, 1)),
        (1 << 30, TritonDecodeConfig(64, 16, False, 4, 2, 1)),
    ),
    # the smallest tiles, which every accepted target holds: contract/rules_triton.py knows what they need
    "other": ((1 << 30, TritonDecodeConfig(16, 16, False, 4, 2, 1)),),
    # the interpreter has no registers and no shared memory to fill; small tiles visit more borders
    "cpu": (
        (16, TritonDecodeConfig(16, 32, False, 4, 1, 2)),
        (32, TritonDecodeConfig(32, 32, True, 4, 1, 2)),
        (1 << 30, TritonDecodeConfig(64, 32, False, 4, 1, 2)),
    ),
}


# The same where a KV tile is not within one page.  Each of its tokens has an address of its own then: two programs a
# multiprocessor hide that work behind each other's loads (102 us against 106 with page 1, 101 against 108 with page 16; one
# page, 91).
TRITON_SCATTERED_CONFIGS: dict[str, tuple[tuple[int, TritonDecodeConfig], ...]] = {
    "sm_90": ((16, TritonDecodeConfig(16, 32, False, 4, 3, 2, True)),),
}


@dataclass(frozen=True)
class GluonConfig:
    """Tile sizes of a Gluon kernel, which plans and merges by itself.

    Attributes:
        block_rows: rows (query token, head) of a row tile.
        column_parts: parts that a program's warpgroups have of the latent columns, one each.
        most_lanes: programs that go through the same keys side by side, at most.
        compute_registers: that a thread of a second warpgroup may use.
        loader_registers: that a thread of the warp that loads whole tiles may use.
        gather_registers: that a thread of the four warps that load token by token may use.
        block_n: tokens of a KV tile.
        small_scan, large_scan: sequences that are looked at at a time, where there are fewer than the first, and otherwise.
        most_programs: of a launch; each has a flag for every other one.
    """

    block_rows: int
    column_parts: int
    most_lanes: int
    compute_registers: int
    loader_registers: int
    gather_registers: int
    block_n: int = 64
    small_scan: int = 32
    large_scan: int = 256
    most_programs: int = 256


# Three KV tiles of 64 tokens take 216 KiB of shared memory, so there is one program a multiprocessor: all of a launch are
# resident, which a kernel whose programs wait for each other must be sure of.  It loads token by token whatever the page size:
# 80.9 us against 83.6 with the copy engine at B64 S4096 H16, 30.3 against 32.3 at B16.
GLUON_FEW_HEADS_CONFIG = GluonConfig(
    block_rows=16,
    column_parts=1,
    most_lanes=1,
    compute_registers=0,
    loader_registers=40,
    gather_registers=120,
)

# 64 rows, the least that the warpgroup instruction takes, of 512 + 64 numbers take 72 KiB of shared memory, two KV tiles 144
# KiB: 226 of 227 KiB in all.  Each warpgroup has the 64 x 256 accumulators of one half of the values, 128 registers of the 216
# that are left when the loading warps keep 80, or the one 40.
GLUON_MANY_HEADS_CONFIG = GluonConfig(
    block_rows=64,
    column_parts=2,
    most_lanes=4,
    compute_registers=216,
    loader_registers=40,
    gather_registers=80,
)


# architectures that run with another one's row: the same matrix instructions, and at least its shared memory
_SAME_FAMILY = {
    "sm_86": "sm_89",
    "sm_87": "sm_80",
    "sm_103": "sm_100",
    "sm_120": "sm_89",
    "sm_121": "sm_89",
    "gfx90a": "gfx942",
    "gfx940": "gfx942",
    "gfx941": "gfx942",
}


def triton_family(target: Target) -> str:
    """The row of ``TRITON_DECODE_CONFIGS`` for ``target``."""
    if target.vendor == "cpu":
        return "cpu"
    family = _SAME_FAMILY.get(target.arch, target.arch)
    part = KNOWN_TARGETS.get(family)
    if part is None or target.shared_memory_bytes < part.shared_memory_bytes:
        # a row's tiles are as large as its own part's shared memory allows
        return "other"
    return family


def triton_decode_configs(problem: DecodeProblem, target: Target) -> tuple[TritonDecodeConfig, ...]:
    """Every config that ``triton_decode_config`` may pick for ``problem``."""
    family = TRITON_DECODE_CONFIGS[triton_family(target)]
    return tuple(dict.fromkeys(triton_decode_config(problem, target, rows) for rows, _ in family))


def triton_decode_config(problem: DecodeProblem, target: Target, rows: int) -> TritonDecodeConfig:
    """The config for sequences of about ``rows`` (query token, head) pairs."""
    if problem.batch_invariant:
        # the tiles must not depend on how many query tokens a sequence brings
        rows = problem.num_heads
    family = TRITON_DECODE_CONFIGS[triton_family(target)]
    config = next((config for most_rows, config in family if rows <= most_rows), family[-1][1])
    if problem.page_size % config.block_n:
        scattered = TRITON_SCATTERED_CONFIGS.get(triton_family(target), ())
        config = next((other for most_rows, other in scattered if rows <= most_rows), config)
    if problem.batch_invariant:
        # a key must be in a tile of the same size whether it is hidden from some rows of the tile, or from none
        return replace(config, block_n=min(config.block_n, CAUSAL_END_BLOCK_N))
    return config


def triton_merge_config(problem: DecodeProblem, target: Target, num_rows: int) -> TritonMergeConfig:
    """The merge of ``num_rows`` rows.

    Many rows go several to a program, since most of them are whole and only looked at.  Few rows are cut into columns, so that
    there are programs for every compute unit, each of which holds 8,192 numbers.
    """
    columns = padded(problem.kv_lora_rank)
    if problem.batch_invariant:
        # the order of the sums must not depend on the number of rows
        return TritonMergeConfig(4, columns, 4, in_order=True)
    programs = 4 * target.compute_units
    if num_rows >= 4 * programs:
        return TritonMergeConfig(8 if num_rows >= 8 * programs else 4, columns, 4, in_order=True)
    block = columns
    while block > 64 and num_rows * (columns // block) < programs:
        block //= 2
    return TritonMergeConfig(1, block, 8192 // block, in_order=False)
