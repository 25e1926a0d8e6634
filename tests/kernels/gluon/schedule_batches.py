"""Batches that the kernels' schedule is tested with, and faults that each of them, or another, must show."""

from __future__ import annotations

import math

from .schedule_call import KEYS, Call
from .schedule_language import Mutant

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


def spread(num_seqs: int, longest: int) -> list[int]:
    """Lengths of all sizes, in no order."""
    return [int(longest * (0.618034 * i % 1.0) ** 3) for i in range(num_seqs)]


def exponential(num_seqs: int, mean: int) -> list[int]:
    """Exponentially spread lengths, in no order."""
    return [int(-mean * math.log(1.0 - 0.618034 * i % 1.0)) for i in range(num_seqs)]


FEW_HEADS_BATCHES = {
    "one sequence, all programs": Call([131072]),
    "one sequence, fewer tiles than programs": Call([5 * KEYS + 1]),
    "one key": Call([1]),
    "no keys": Call([0, 0, -3], programs=2),
    "two sequences, one tile for many programs": Call([KEYS, 3 * KEYS]),
    "three sequences, few tiles for many programs": Call([1, 500, 90]),
    "even, a row tile each": Call([1000] * 128),
    "even, two workers each": Call([4096] * 64),
    "even, seven programs": Call([4096] * 3, programs=7),
    "even, several row tiles each": Call([900] * 5, even_q_len=3, programs=4),
    "nearly even": Call([4096] * 40 + [4160] + [4096] * 23, programs=16),
    "a border a sixteenth before an end": Call([34 * KEYS, 30 * KEYS], programs=2),
    "a border a sixteenth behind a beginning": Call([30 * KEYS, 34 * KEYS], programs=2),
    "a last piece of a sixteenth": Call([66 * KEYS, 30 * KEYS], programs=3),
    "all sizes": Call(spread(31, 60000)),
    "all sizes, 32 sequences": Call(spread(32, 60000), num_heads=5, programs=60),
    "255, 256 and 257 sequences": Call(spread(257, 9000), programs=16),
    "past a scan": Call(spread(600, 3000), programs=7),
    "alike but for a longer one past a scan": Call([30] * 256 + [200] * 4, programs=3),
    "alike but for shorter ones past a scan": Call([200] * 256 + [30] * 4, programs=3),
    "exponential": Call(exponential(64, 4096)),
    "exponential, few tiles each": Call(exponential(30, 150), programs=20),
    "a long one among short ones": Call([10] * 60 + [200000] + [10] * 60),
    "a long one among many short ones": Call([70] * 300 + [9000] + [1] * 100, programs=16),
    "lengths past the table": Call([INT32_MAX, 5, INT32_MIN, 300], capacity=1024, programs=3),
    "several row tiles each": Call([700, 0, 5000], even_q_len=4, num_heads=12, programs=7),
    "ragged": Call(spread(9, 20000), [0, 1, 1, 4, 4, 4, 9, 10, 12, 12], 12, num_heads=16, programs=16),
    "ragged, padding around": Call([500, 900], [3, 4, 6], 11, num_heads=8, programs=3),
    "ragged, starts that fall": Call(spread(5, 7000), [0, 4, 2, INT32_MAX, -1, 6], 8, programs=7),
    "ragged, past a scan": Call(
        spread(300, 4000), [i - i // 3 for i in range(301)], 203, num_heads=4, programs=7
    ),
    "ragged, all in the padding": Call([900] * 40, [0] * 41, 5, programs=3),
    "row tiles of 32 rows": Call(spread(20, 9000), even_q_len=3, rows=32, programs=16),
}

# with 128 heads a group of two row tiles is a query token
MANY_HEADS_BATCHES = {
    "one sequence, all programs": Call([131072], num_heads=128, lanes=2, programs=66),
    "one sequence, tiles for one program": Call([5 * KEYS], num_heads=128, lanes=2, programs=66),
    "two sequences, few tiles for many programs": Call([300, 2000], num_heads=128, lanes=2, programs=66),
    "three sequences, a tile each": Call([1, 64, 0], num_heads=64, lanes=1, programs=132),
    "even, a group each": Call([1000] * 64, num_heads=128, lanes=2, programs=66),
    "even, parts of a group": Call([4096] * 4, num_heads=128, lanes=2, programs=66),
    "even, several groups each": Call([900] * 5, even_q_len=3, num_heads=128, lanes=2, programs=8),
    "even, past a scan": Call([200] * 300, num_heads=128, lanes=2, programs=66),
    "no keys": Call([0, 0, 0], num_heads=128, lanes=2, programs=2),
    "all sizes": Call(spread(31, 60000), num_heads=128, lanes=2, programs=66),
    "exponential": Call(exponential(64, 4096), num_heads=128, lanes=2, programs=66),
    "exponential, few tiles each": Call(exponential(40, 400), num_heads=64, lanes=1, programs=40),
    "a long one among short ones": Call([10] * 60 + [200000] + [10] * 60, num_heads=64, lanes=1),
    "a long one among many short ones": Call([70] * 300 + [9000], num_heads=128, lanes=2, programs=9),
    "a short one each, many for a program": Call([64, 128] * 40, num_heads=128, lanes=2, programs=8),
    "a lane without rows": Call([700, 0, 5000, 90], num_heads=100, even_q_len=3, lanes=4, programs=5),
    "three lanes": Call(spread(20, 9000), num_heads=32, even_q_len=5, lanes=3, programs=16),
    "ragged": Call(
        spread(9, 20000), [0, 1, 1, 4, 4, 4, 9, 10, 12, 12], 12, num_heads=128, lanes=2, programs=9
    ),
    "ragged, one lane": Call(
        spread(5, 7000), [0, 4, 2, INT32_MAX, -1, 6], 8, num_heads=20, lanes=1, programs=7
    ),
    "ragged, past a scan": Call(
        spread(300, 4000), [i - i // 3 for i in range(301)], 203, num_heads=40, lanes=1, programs=7
    ),
    "ragged, a lane whose first row is past the last": Call(
        [700, 100, 90], [0, 1, 2, 4], 4, num_heads=64, lanes=2, programs=3
    ),
    "ragged, even": Call([640] * 30, list(range(31)), 30, num_heads=128, lanes=2, programs=8),
}

# code that only saves time has none here
MUTANTS = {
    "a border that moves a tile further": Mutant(
        "shares.border", "begin <= shares.slack", "begin <= shares.slack + 1"
    ),
    "a border that moves a tile less": Mutant(
        "shares.border", "end - ideal <= shares.slack", "end - ideal < shares.slack"
    ),
    "a border in another sequence": Mutant("shares.border", "shares.extra", "0"),
    "another slack for the first worker": Mutant(
        "shares.unit_at", "begin <= shares.slack", "begin < shares.slack"
    ),
    "another slack for the last worker": Mutant(
        "shares.unit_at", "end - last_border <= shares.slack", "end - last_border < shares.slack"
    ),
    "another row tile for a unit": Mutant("shares.unit_at", "shares.extra", "0"),
    "shares of base tiles": Mutant("shares.ideal_border", " + gl.minimum(within, shares.rest)", ""),
    "a worker too early": Mutant("shares.ideal_worker", "gl.where(is_longer, 0, shares.rest)", "0"),
    # what a row tile counts besides its KV tiles
    "extra tiles that no total has": Mutant("shares.share_out", "total += units * extra", "total += 0"),
    "extra tiles of the first scan alone": Mutant(
        "shares.share_out", "units += gl.sum(more.row_tiles, 0)", "units += 0"
    ),
    "extra tiles of more than a quarter": Mutant(
        "shares.share_out", "gl.minimum(EXTRA, divide(total, workers) // 4)", "EXTRA"
    ),
    "no extra tiles": Mutant("shares.share_out", "gl.minimum(EXTRA,", "gl.minimum(0,"),
    "a slack without extra tiles": Mutant(
        "shares.share_out", "gl.maximum(base // SLACK, extra)", "base // SLACK"
    ),
    "a sequence found without extra tiles": Mutant(
        "shares.find", "sequences.kv_tiles + extra", "sequences.kv_tiles"
    ),
    "a sequence past a scan found without extra tiles": Mutant(
        "shares.find", "more.kv_tiles + extra", "more.kv_tiles"
    ),
    "a sequence that ends without extra tiles": Mutant("shares.sequence_end", " + extra", ""),
    "a row tile that ends without extra tiles": Mutant("shares.row_tile_at", " + extra", ""),
    "keys that begin with extra tiles": Mutant("shares.key_tiles", "tile - begin - extra", "tile - begin"),
    "keys that end with extra tiles": Mutant("shares.key_tiles", "end - begin - extra", "end - begin"),
    "keys for who has none": Mutant("shares.key_tiles", "(kv_len + KEYS - 1) // KEYS", "kv_tiles(kv_len)"),
    # row tiles that are alike
    "alike by the first scan alone": Mutant(
        "shares.share_out",
        "shortest = gl.minimum(shortest, gl.min(gl.where(more.row_tiles > 0, more.kv_tiles, _MOST), 0))",
        "pass",
    ),
    "alike but for a longer one past a scan": Mutant(
        "shares.share_out",
        "longest = gl.maximum(longest, gl.max(gl.where(more.row_tiles > 0, more.kv_tiles, 0), 0))",
        "pass",
    ),
    "sequences without queries that count": Mutant(
        "shares.share_out",
        "gl.where(sequences.row_tiles > 0, sequences.kv_tiles, _MOST)",
        "sequences.kv_tiles",
    ),
    "one size for all that differ": Mutant("shares.share_out", "even_tiles = 0", "even_tiles = longest"),
    "more of the programs without work": Mutant(
        "shares.share_out", "takers * 16 >= workers * 15", "takers * 16 >= workers * 12"
    ),
    "a sequence of one row tile": Mutant(
        "shares.find_even", "row_tiles(batch.even_q_len, NUM_HEADS, ROWS) * tiles", "tiles"
    ),
    "a sequence before which one is not counted": Mutant(
        "shares.find_even", "sequence * each, q_begin", "sequence * tiles, q_begin"
    ),
    "a sequence that is its query token": Mutant(
        "shares.find_even", "q_begin = sequence * batch.even_q_len", "q_begin = sequence"
    ),
    "tiny shares": Mutant("shares.share_out", "total // SMALLEST", "total"),
    "tiny parts of a row tile": Mutant("shares.share_out", "longest // SMALLEST", "longest"),
    # sequences
    "a second scan from nothing": Mutant("shares.find", "total + gl.associative_scan", "gl.associative_scan"),
    "queries that go back": Mutant(
        "shares.look_at", "gl.maximum(query_start(index + 1, batch), begin)", "query_start(index + 1, batch)"
    ),
    # the few-heads kernel
    "a state in the slot of another": Mutant("pieces.slot_of", "piece == 0, 1, 0", "piece == 0, 0, 0"),
    "unions of the wrong row tile": Mutant(
        "few_heads.consumer.attend_share", "q_begin_after = place.q_begin", "q_begin_after = 0"
    ),
    "few heads: keys without extra tiles": Mutant(
        "few_heads.consumer.attend_segment", "place.kv_len, extra)", "place.kv_len, 0)"
    ),
    "few heads: a sequence without extra tiles": Mutant(
        "few_heads.consumer.attend_share", "sequence_end(place, shares.extra,", "sequence_end(place, 0,"
    ),
    "few heads: a query that nobody frees": Mutant(
        "few_heads.consumer.attend_segment", "first >= last", "False"
    ),
    "few heads: the place of a tile that is not there": Mutant(
        "few_heads.consumer.attend_share", "has_keys = place.kv_len > 0", "has_keys = True"
    ),
    "few heads: a loader that keeps its sequence": Mutant(
        "few_heads.loader.load_share", "place = following(", "following("
    ),
    "few heads: a loader's sequence without extra tiles": Mutant(
        "few_heads.loader.load_share", "sequence_end(place, extra,", "sequence_end(place, 0,"
    ),
    "few heads: a loader's row tile without extra tiles": Mutant(
        "few_heads.loader.load_share", "row_tile_at(tile, place, extra,", "row_tile_at(tile, place, 0,"
    ),
    "few heads: a loader's keys without extra tiles": Mutant(
        "few_heads.loader.load_share", "place.kv_len, extra)", "place.kv_len, 0)"
    ),
    "few heads: a loader with the rows of the first tile": Mutant(
        "few_heads.loader.load_share", "rows = next_rows", "pass"
    ),
    "few heads: a loader with the length of the first tile": Mutant(
        "few_heads.loader.load_share", "exists = next_exists", "pass"
    ),
    # the many-heads kernel
    "many heads: keys without extra tiles": Mutant(
        "many_heads.halves.attend_segment", "kv_len, extra)", "kv_len, 0)"
    ),
    "many heads: a sequence without extra tiles": Mutant(
        "many_heads.halves.attend_share", "sequence_end(place, shares.extra,", "sequence_end(place, 0,"
    ),
    "many heads: unions of another lane's rows": Mutant(
        "many_heads.halves.attend_share", "row_before = first_row", "row_before = unit.row_tile * GROUP"
    ),
    "many heads: sums in the turn of a segment without keys": Mutant(
        "many_heads.halves.attend_share", "key_turn += has_keys.to(gl.int32)", "key_turn += 1"
    ),
    "many heads: keys for rows past the last": Mutant(
        "many_heads.loader.keys_of", "first_row < place.q_len", "first_row <= place.q_len"
    ),
    "many heads: the halves of another lane": Mutant(
        "many_heads.halves.attend_share", "unit.row_tile * GROUP + lane * ROWS", "unit.row_tile * GROUP"
    ),
    "many heads: a loader of another lane": Mutant(
        "many_heads.loader.load_share", "group * GROUP + lane * ROWS", "group * GROUP"
    ),
    "many heads: a loader's sequence without extra tiles": Mutant(
        "many_heads.loader.load_share", "sequence_end(place, extra,", "sequence_end(place, 0,"
    ),
    "many heads: a loader's row tile without extra tiles": Mutant(
        "many_heads.loader.load_share", "row_tile_at(tile, place, extra,", "row_tile_at(tile, place, 0,"
    ),
    "many heads: a loader's keys without extra tiles": Mutant(
        "many_heads.loader.load_share", "kv_len, extra)", "kv_len, 0)"
    ),
    "many heads: pairs whose second tile is the first": Mutant(
        "many_heads.loader.load_share", "gl.minimum(t + tile_of_pair, last - 1)", "gl.minimum(t, last - 1)"
    ),
    "many heads, token by token: a sequence without extra tiles": Mutant(
        "many_heads.gather.gather_share", "sequence_end(place, extra,", "sequence_end(place, 0,"
    ),
    "many heads, token by token: a row tile without extra tiles": Mutant(
        "many_heads.gather.gather_share", "row_tile_at(tile, place, extra,", "row_tile_at(tile, place, 0,"
    ),
    "many heads, token by token: keys without extra tiles": Mutant(
        "many_heads.gather.gather_share", "kv_len, extra)", "kv_len, 0)"
    ),
    "many heads, token by token: keys of the next share": Mutant(
        "many_heads.gather.gather_share", "gl.minimum(kv_len, last * KEYS)", "kv_len"
    ),
    "many heads, token by token: the rows of the first tile": Mutant(
        "many_heads.gather.gather_share", "rows = next_rows", "pass"
    ),
    "many heads, token by token: keys of the tile before": Mutant(
        "many_heads.gather.gather_share", "exists = next_exists", "pass"
    ),
    "many heads: pairs of which both tiles are there": Mutant(
        "many_heads.loader.load_share", "t + tile_of_pair < last", "t < last"
    ),
}
