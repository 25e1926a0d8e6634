"""Partial states of row tiles that several programs share: published, waited for, and united in the same launch.

A program publishes at most two: of the row tile that began before its share, in its slot 0, and of the one that ends after it,
in its slot 1.  Of up to FEW pieces the program that begins the row tile adds the others to its own registers: it comes to this
row tile last, when the others are long done with theirs.  Of more, each program that has a piece unites all pieces for its part
of the numbers.

flags[reader's slot, piece] is PUBLISHED once that piece is, for a reader that is to have it; who has read it puts 0 there.
So flags are 0 before and after each launch, whatever its batch was, and any other number in a workspace that nobody has used
is no PUBLISHED either.

Programs wait for one another here, which only a cooperative launch may: all of its programs are resident, or none is.  What is
waited for is published before its program waits for anything itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedmla.kernels.gluon.few_heads.layouts import (
    COMPUTE_WARPS,
    LATENT,
    state_layout,
)
from pagedmla.kernels.split_kv.merge import LN2

FEW = gl.constexpr(4)
# flags that are looked at at a time: no grid has more programs
MOST_PIECES = gl.constexpr(256)
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
def state_place(slot, ROWS: gl.constexpr):
    """Where a slot begins: (in ``Partials.out``, in ``Partials.lse``)."""
    slot = slot.to(gl.int64)
    return slot * (ROWS * LATENT), slot * ROWS


@gluon.jit
def flag_pointers(slot, piece, partials):
    """Flags of ``piece`` for the reader with ``slot``; one of the two may be a vector."""
    return partials.flags + slot * gl.num_programs(0) + piece


@gluon.jit
def publish(o, lse2, unit, worker, partials, ROWS: gl.constexpr):
    """Writes one state (out, base-2 lse), then the flags of those who are to read it."""
    mine = worker - unit.first
    out_place, lse_place = state_place(slot_of(worker, mine), ROWS)
    LAYOUT: gl.constexpr = state_layout(ROWS)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    column = gl.arange(0, LATENT, gl.SliceLayout(1, LAYOUT))
    gl.store(partials.out + out_place + row[None, :] * LATENT + column[:, None], o)
    gl.store(partials.lse + lse_place + row, lse2)
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
def add_pieces(o, lse2, worker, pieces, partials, ROWS: gl.constexpr):
    """The state of a whole row tile from that of its first piece, ``worker``'s, and the others', which are few."""
    LAYOUT: gl.constexpr = state_layout(ROWS)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    column = gl.arange(0, LATENT, gl.SliceLayout(1, LAYOUT))
    await_pieces(worker, 0, pieces, partials)
    for piece in range(1, pieces):
        out_place, lse_place = state_place(slot_of(worker + piece, piece), ROWS)
        other_lse = gl.load(partials.lse + lse_place + row)
        other = gl.load(partials.out + out_place + row[None, :] * LATENT + column[:, None])
        largest = gl.maximum(lse2, other_lse)
        shift = gl.where(largest == float("-inf"), 0.0, largest)
        mine = gl.exp2(lse2 - shift)
        others = gl.exp2(other_lse - shift)
        both = mine + others
        divisor = gl.where(both == 0.0, 1.0, both)
        o = o * (mine / divisor)[None, :] + other * (others / divisor)[None, :]
        lse2 = largest + gl.log2(divisor)
    return o, lse2


@gluon.jit
def unite_parts(
    first_worker, pieces, mine, rows, outputs, partials,
    MOST: gl.constexpr, PART: gl.constexpr,
    ROWS: gl.constexpr, NUM_HEADS: gl.constexpr,
):  # fmt: skip
    """Unites the pieces, MOST at a time, for PART of the numbers at a time: parts mine, mine + pieces, ...

    Each warp has all pieces of its numbers, so that nothing passes through shared memory.
    """
    LANES: gl.constexpr = PART // (4 * COMPUTE_WARPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [1, COMPUTE_WARPS], [1, 0])
    q_begin, q_len, row_tile = rows
    piece = gl.arange(0, MOST, gl.SliceLayout(1, LAYOUT))
    number = gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
    part = mine
    while part < ROWS * LATENT // PART:
        in_tile = part // (LATENT // PART)
        part_of_row = part - in_tile * (LATENT // PART)
        column = part_of_row * PART + number
        largest = float("-inf")
        total = 0.0
        united = gl.zeros([PART], gl.float32, gl.SliceLayout(0, LAYOUT))
        for first in range(0, pieces, MOST):
            exists = first + piece < pieces
            slot = slot_of(first_worker + first + piece, first + piece)
            out_places, lse_places = state_place(slot, ROWS)
            lse2 = gl.load(partials.lse + lse_places + in_tile, mask=exists, other=float("-inf"))
            # a piece that saw no key has zeros
            out = gl.load(
                partials.out + out_places[:, None] + (in_tile * LATENT + column)[None, :],
                mask=exists[:, None],
                other=0.0,
            )
            new_largest = gl.maximum(largest, gl.max(lse2, 0))
            shift = gl.where(new_largest == float("-inf"), 0.0, new_largest)
            factor = gl.exp2(largest - shift)
            weight = gl.exp2(lse2 - shift)
            total = total * factor + gl.sum(weight, 0)
            united = united * factor + gl.sum(weight[:, None] * out, 0)
            largest = new_largest
        divisor = gl.where(total == 0.0, 1.0, total)
        row = row_tile * ROWS + in_tile
        token = (q_begin + row // NUM_HEADS).to(gl.int64)
        head = (row % NUM_HEADS).to(gl.int64)
        is_row = row < q_len * NUM_HEADS
        final = outputs.out + token * outputs.out_token_stride + head * outputs.out_head_stride
        narrow = (united / divisor).to(outputs.out.dtype.element_ty)
        if is_row:
            gl.store(final + column, narrow)
        if (part_of_row == 0) & is_row:
            lse = outputs.lse + token * outputs.lse_token_stride + head * outputs.lse_head_stride
            gl.store(lse, (largest + gl.log2(divisor)) * LN2)
        part += pieces


@gluon.jit
def unite(
    first_worker, pieces, mine, rows, outputs, partials,
    ROWS: gl.constexpr, NUM_HEADS: gl.constexpr,
):  # fmt: skip
    """This program's part of a row tile in many pieces, of which it has piece ``mine``."""
    await_pieces(first_worker, mine, pieces, partials)
    # 64 numbers of pieces are with a thread at a time, all on their way at once
    if pieces <= 16:
        unite_parts(first_worker, pieces, mine, rows, outputs, partials, 16, 512, ROWS, NUM_HEADS)
    elif pieces <= 32:
        unite_parts(first_worker, pieces, mine, rows, outputs, partials, 32, 256, ROWS, NUM_HEADS)
    else:
        unite_parts(first_worker, pieces, mine, rows, outputs, partials, 128, 64, ROWS, NUM_HEADS)
