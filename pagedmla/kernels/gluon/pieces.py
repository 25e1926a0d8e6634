"""Partial states of row tiles that several programs share: published, waited for, and united in the same launch.

Programs share out work in teams, each for itself: those of a lane, and with many heads for each half of the columns
(``layouts.Partials``).  A program publishes at most two states: of the row tile that began before its share, in its slot 0, and
of the one that ends after it, in its slot 1.  Of up to FEW pieces the program that begins the row tile adds the others to its
own registers: it comes to this row tile last, when the others are long done with theirs.  Of more, each program that has a
piece unites all pieces for its part of the numbers.

flags[reader's slot, piece] is PUBLISHED once that piece is, for a reader that is to have it; who has read it puts 0 there.
So flags are 0 before and after each launch, whatever its batch was, and any other number in a workspace that nobody has used
is no PUBLISHED either.

Programs wait for one another here, which only a cooperative launch may: all of its programs are resident, or none is.  What is
waited for is published before its program waits for anything itself.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedmla.kernels.gluon.layouts import COMPUTE_WARPS
from pagedmla.kernels.gluon.opaque import zero_here
from pagedmla.kernels.split_kv.merge import LN2

# flags that are looked at at a time: no grid has more programs
MOST_PIECES = gl.constexpr(256)
# of all pieces that a program unites at a time: 64 a thread
NUMBERS = gl.constexpr(8192)
# a number that memory does not hold by chance
PUBLISHED = gl.constexpr(0x2B992DDFA23249D6)
_FLAG_LAYOUT = gl.constexpr(gl.BlockedLayout([2], [32], [COMPUTE_WARPS.value], [0]))


@gluon.jit
def fence(x):
    """Returns ``x`` i32.  What a thread's program wrote before is there for who sees a flag that it writes after; and what was
    written before a flag that it has seen is there for it.
    """
    return gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def slot_of(worker, piece):
    """The slot of a row tile's piece with ``worker``: the first piece ends a share, the others begin one."""
    return 2 * worker + gl.where(piece == 0, 1, 0)


@gluon.jit
def state_place(slot, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Where a slot begins: (in ``Partials.out``, in ``Partials.lse``)."""
    slot = slot.to(gl.int64)
    return slot * (ROWS * COLUMNS), slot * ROWS


@gluon.jit
def number_place(row, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Where a state's number stands in its slot.

    As the accumulators have them, so that the threads of a warp write to neighbouring places: of 8 columns all rows; of few
    rows, whose accumulators are transposed, of 8 rows all columns.
    """
    if ROWS >= 64:
        return column // 8 * (ROWS * 8) + row * 8 + column % 8
    else:
        return row // 8 * (COLUMNS * 8) + column * 8 + row % 8


@gluon.jit
def flag_pointers(slot, piece, partials):
    """Flags of ``piece`` for the reader with ``slot``; one of the two may be a vector."""
    return partials.flags + slot * partials.programs + piece


@gluon.jit
def publish(o, lse2, unit, worker, partials, FEW: gl.constexpr):
    """Writes one state (out [ROWS, COLUMNS], base-2 lse [ROWS]), then the flags of those who are to read it."""
    ROWS: gl.constexpr = o.shape[0]
    COLUMNS: gl.constexpr = o.shape[1]
    LAYOUT: gl.constexpr = o.type.layout
    mine = worker - unit.first
    out_place, lse_place = state_place(slot_of(worker, mine), ROWS, COLUMNS)
    row = zero_here() + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    gl.store(partials.out + out_place + number_place(row[:, None], column[None, :], ROWS, COLUMNS), o)
    gl.store(partials.lse + lse_place + row, gl.convert_layout(lse2, gl.SliceLayout(1, LAYOUT)))
    gl.thread_barrier()
    mine = fence(mine)
    reader = gl.arange(0, MOST_PIECES, _FLAG_LAYOUT)
    reads = (reader < unit.pieces) & (reader != mine) & ((reader == 0) | (unit.pieces > FEW))
    flags = flag_pointers(slot_of(unit.first + reader, reader), mine, partials)
    published = gl.full([MOST_PIECES], PUBLISHED, gl.int64, _FLAG_LAYOUT)
    gl.atomic_xchg(flags, published, mask=reads, sem="relaxed", scope="gpu")


@gluon.jit
def await_pieces(first_worker, mine, pieces, partials):
    """Waits until all pieces of a row tile but ``mine`` are published."""
    piece = gl.arange(0, MOST_PIECES, _FLAG_LAYOUT)
    wanted = (piece < pieces) & (piece != mine)
    flags = flag_pointers(slot_of(first_worker + mine, mine), piece, partials)
    nothing = gl.zeros([MOST_PIECES], gl.int64, _FLAG_LAYOUT)
    missing = 1
    while missing > 0:
        flag = gl.atomic_or(flags, nothing, mask=wanted, sem="acquire", scope="gpu")
        missing = gl.max((wanted & (flag != PUBLISHED)).to(gl.int32), 0)
    gl.store(flags, nothing, mask=wanted)
    gl.thread_barrier()


@gluon.jit
def add_pieces(o, lse2, worker, pieces, partials):
    """The state [ROWS, COLUMNS] of a row tile from that of its first piece, ``worker``'s, and the others', which are few."""
    ROWS: gl.constexpr = o.shape[0]
    COLUMNS: gl.constexpr = o.shape[1]
    LAYOUT: gl.constexpr = o.type.layout
    row = zero_here() + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    lse2 = gl.convert_layout(lse2, gl.SliceLayout(1, LAYOUT))
    await_pieces(worker, 0, pieces, partials)
    for piece in range(1, pieces):
        out_place, lse_place = state_place(slot_of(worker + piece, piece), ROWS, COLUMNS)
        other_lse = gl.load(partials.lse + lse_place + row)
        other = gl.load(partials.out + out_place + number_place(row[:, None], column[None, :], ROWS, COLUMNS))
        largest = gl.maximum(lse2, other_lse)
        shift = gl.where(largest == float("-inf"), 0.0, largest)
        mine = gl.exp2(lse2 - shift)
        others = gl.exp2(other_lse - shift)
        both = mine + others
        divisor = gl.where(both == 0.0, 1.0, both)
        o = o * (mine / divisor)[:, None] + other * (others / divisor)[:, None]
        lse2 = largest + gl.log2(divisor)
    return o, lse2


@gluon.constexpr_function
def part_shape(most: int, rows: int) -> tuple[int, int]:
    """(rows, columns) of a part of the numbers of ``most`` pieces: numbers that stand one after the other in a slot."""
    numbers = NUMBERS.value // most
    if rows < 64:
        return 8, numbers // 8
    return min(rows, numbers // 8), max(8, numbers // rows)


@gluon.constexpr_function
def part_layout(most: int, rows: int) -> Any:
    """Layout [pieces, rows, columns] of a part: neighbouring numbers are with neighbouring threads, and each warp has all
    pieces of its numbers, so that nothing passes through shared memory.
    """
    warps = COMPUTE_WARPS.value
    part_rows, part_columns = part_shape(most, rows)
    if rows >= 64:
        each = min(4, part_rows * part_columns // (32 * warps))
        return gl.BlockedLayout([1, 1, each], [1, 4 * each, 8 // each], [1, warps, 1], [2, 1, 0])
    # 4 numbers a thread, so where they are few, its neighbours have other pieces
    columns = min(16, part_columns // warps)
    return gl.BlockedLayout([1, 4, 1], [16 // columns, 2, columns], [1, 1, warps], [1, 2, 0])


@gluon.jit
def unite_parts(
    first_worker, pieces, mine, rows, outputs, partials,
    MOST: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, NUM_HEADS: gl.constexpr, STORE_LSE: gl.constexpr,
):  # fmt: skip
    """Unites the pieces, MOST at a time, for a part of the numbers at a time: parts mine, mine + pieces, ...

    Of all pieces' numbers 64 are with a thread at a time, all on their way at once.
    """
    PART_ROWS: gl.constexpr = part_shape(MOST, ROWS)[0]
    PART_COLUMNS: gl.constexpr = part_shape(MOST, ROWS)[1]
    LAYOUT: gl.constexpr = part_layout(MOST, ROWS)
    PIECE_ROW: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    ROW_COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    PARTS_OF_ROW: gl.constexpr = COLUMNS // PART_COLUMNS
    q_begin, q_len, first_row = rows
    piece = gl.arange(0, MOST, gl.SliceLayout(1, PIECE_ROW))
    part = mine
    while part < ROWS // PART_ROWS * PARTS_OF_ROW:
        first_in_tile = part // PARTS_OF_ROW * PART_ROWS
        first_column = part % PARTS_OF_ROW * PART_COLUMNS
        in_tile = first_in_tile + gl.arange(0, PART_ROWS, gl.SliceLayout(0, PIECE_ROW))
        largest = gl.full([PART_ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, PIECE_ROW))
        total = gl.zeros([PART_ROWS], gl.float32, gl.SliceLayout(0, PIECE_ROW))
        united = gl.zeros([PART_ROWS, PART_COLUMNS], gl.float32, ROW_COLUMN)
        number_row = first_in_tile + gl.arange(0, PART_ROWS, gl.SliceLayout(1, ROW_COLUMN))
        number_column = first_column + gl.arange(0, PART_COLUMNS, gl.SliceLayout(0, ROW_COLUMN))
        numbers = number_place(number_row[:, None], number_column[None, :], ROWS, COLUMNS)
        for first in range(0, pieces, MOST):
            exists = first + piece < pieces
            slot = slot_of(first_worker + first + piece, first + piece)
            out_places, lse_places = state_place(slot, ROWS, COLUMNS)
            lse2 = gl.load(
                partials.lse + lse_places[:, None] + in_tile[None, :],
                mask=exists[:, None],
                other=float("-inf"),
            )
            # a piece that saw no key has zeros
            out = gl.load(
                partials.out + out_places[:, None, None] + numbers[None, :, :],
                mask=exists[:, None, None],
                other=0.0,
            )
            new_largest = gl.maximum(largest, gl.max(lse2, 0))
            shift = gl.where(new_largest == float("-inf"), 0.0, new_largest)
            factor = gl.exp2(largest - shift)
            weight = gl.exp2(lse2 - shift[None, :])
            total = total * factor + gl.sum(weight, 0)
            united = united * row_vector(factor, LAYOUT)[:, None] + gl.sum(weight[:, :, None] * out, 0)
            largest = new_largest
        divisor = gl.where(total == 0.0, 1.0, total)
        united = united / row_vector(divisor, LAYOUT)[:, None]
        row = first_row + number_row
        token = (q_begin + row // NUM_HEADS).to(gl.int64)
        head = (row % NUM_HEADS).to(gl.int64)
        is_row = row < q_len * NUM_HEADS
        final = outputs.out + token * outputs.out_token_stride + head * outputs.out_head_stride
        gl.store(
            final[:, None] + number_column[None, :],
            united.to(outputs.out.dtype.element_ty),
            mask=is_row[:, None],
        )
        if STORE_LSE:  # noqa: SIM102  (known when this is compiled)
            if first_column == 0:
                lse_row = first_row + in_tile
                lse_token = (q_begin + lse_row // NUM_HEADS).to(gl.int64)
                lse_head = (lse_row % NUM_HEADS).to(gl.int64)
                lse = outputs.lse + lse_token * outputs.lse_token_stride + lse_head * outputs.lse_head_stride
                gl.store(lse, (largest + gl.log2(divisor)) * LN2, mask=lse_row < q_len * NUM_HEADS)
        part += pieces


@gluon.jit
def row_vector(values, LAYOUT: gl.constexpr):
    """Values of the rows as rows of numbers [rows, columns] have them."""
    return gl.convert_layout(values, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))


@gluon.jit
def unite(
    first_worker, pieces, mine, rows, outputs, partials,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, NUM_HEADS: gl.constexpr, STORE_LSE: gl.constexpr,
):  # fmt: skip
    """This program's part of a row tile in many pieces, of which it has piece ``mine``.

    ``rows``: the first query token and the number of them of the sequence, and the row tile's first row.
    """
    await_pieces(first_worker, mine, pieces, partials)
    if ROWS >= 64:
        if pieces <= 4:
            unite_parts(
                first_worker, pieces, mine, rows, outputs, partials, 4, ROWS, COLUMNS, NUM_HEADS, STORE_LSE
            )
        else:
            unite_parts(
                first_worker, pieces, mine, rows, outputs, partials, 16, ROWS, COLUMNS, NUM_HEADS, STORE_LSE
            )
    elif pieces <= 8:
        unite_parts(
            first_worker, pieces, mine, rows, outputs, partials, 8, ROWS, COLUMNS, NUM_HEADS, STORE_LSE
        )
    elif pieces <= 16:
        unite_parts(
            first_worker, pieces, mine, rows, outputs, partials, 16, ROWS, COLUMNS, NUM_HEADS, STORE_LSE
        )
    elif pieces <= 64:
        unite_parts(
            first_worker, pieces, mine, rows, outputs, partials, 64, ROWS, COLUMNS, NUM_HEADS, STORE_LSE
        )
    else:
        unite_parts(
            first_worker, pieces, mine, rows, outputs, partials, 128, ROWS, COLUMNS, NUM_HEADS, STORE_LSE
        )
