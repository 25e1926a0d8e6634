"""Values of the kernel for few rows against the float64 oracle, where it differs from the other one."""

from __future__ import annotations

import pytest
import torch
from batches import same_bits
from gluon_backend import (
    DTYPES,
    EVEN,
    arguments,
    checked,
    make_batch,
    needs_hopper,
    run,
)

from pagedmla.contract.errors import Unsupported
from pagedmla.kernels.gluon import choice
from pagedmla.kernels.gluon.choice import Choice

# the oracle's matrices are large here
pytestmark = [needs_hopper, pytest.mark.all_threads]

LENS = [131, 0, 1, 1030, 127, 64, 65, 128, 129, 2]
HEADS = (1, 2, 5, 8, 12, 16, 20, 32)
BLOCK_ROWS = 16


def kernels_of(launched: list[Choice]) -> list[str]:
    return [one.kernel for one in launched]


@pytest.mark.parametrize(
    ("num_heads", "q_len"), [(n, q) for n in HEADS for q in (1, 2, 3, 4) if n * q <= 32], ids=str
)  # fmt: skip
def test_heads_and_query_lengths(num_heads: int, q_len: int, launched: list[Choice]) -> None:
    """Up to 32 rows a sequence, in whichever kernel; fewer keys than queries, and none; with and without query starts."""
    lens = [*LENS, q_len]
    call = arguments(make_batch(lens, [q_len] * len(lens), num_heads=num_heads))
    checked(call | EVEN)
    checked(call, max_q_len=q_len)
    assert kernels_of(launched) == 2 * ["few_heads" if num_heads * q_len <= BLOCK_ROWS else "many_heads"]
    checked(call | EVEN | {"causal": False})


@pytest.mark.parametrize("num_heads", [1, 5, 8, 16])
def test_ragged_queries_of_any_length(num_heads: int, launched: list[Choice]) -> None:
    """The average is small, so some sequences have several row tiles; many have no query token at all."""
    q_lens = [1, 2, 0, 4, 0, 0, 0, 1, 0, 1]
    call = arguments(make_batch(LENS, q_lens, num_heads=num_heads))
    checked(call)
    assert kernels_of(launched) == ["few_heads"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 32, 48, 64, 100, 128, 192, 480])
def test_pages(page_size: int, dtype: torch.dtype) -> None:
    """Of any size: of tokens that are copied one by one, and of whole tiles."""
    lens = [page_size + 1, 0, 131, page_size, 3 * page_size - 1, 700]
    checked(arguments(make_batch(lens, num_heads=16, q_dtype=dtype), page_size) | EVEN)
    checked(
        arguments(make_batch(lens, [1, 1, 3, 2, 1, 2], num_heads=5, q_dtype=dtype), page_size), max_q_len=3
    )


@pytest.mark.parametrize("num_seqs", [1, 30, 31, 32, 33, 255, 256, 257, 600])
def test_any_number_of_sequences(num_seqs: int, launched: list[Choice]) -> None:
    """Around what is looked at at once, the padding's place included."""
    lens = [(37 * place + 5) % 300 for place in range(num_seqs)]
    checked(arguments(make_batch(lens, num_heads=16)) | EVEN)
    q_lens = [(7 * place + 1) % 4 for place in range(num_seqs)]
    checked(arguments(make_batch(lens, q_lens, num_heads=4)), max_q_len=3)
    assert kernels_of(launched) == ["few_heads", "few_heads"]


def test_query_tokens_only_past_many_sequences_without_any(launched: list[Choice]) -> None:
    lens = [(37 * place) % 200 for place in range(530)]
    q_lens = [0] * 530
    q_lens[280], q_lens[529] = 2, 3
    checked(arguments(make_batch(lens, q_lens, num_heads=5)))
    assert kernels_of(launched) == ["few_heads"]


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("lens", [[4097, 0, 9001, 131, 1], [45118], [1024] * 64], ids=len)
def test_long_sequences_in_small_pages(lens: list[int], page_size: int) -> None:
    """The same bits as with pages of whole tiles, in one piece and in many."""
    batch = make_batch(lens, num_heads=16, spread=0.7)
    small = checked(arguments(batch, page_size) | EVEN)
    assert same_bits(small, run(arguments(batch) | EVEN))


def test_too_many_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any launch, and then Triton decodes them."""
    monkeypatch.setattr(choice, "_MOST_TILES_EACH", 1)
    call = arguments(make_batch([300, 0, 700], [1, 0, 2], num_heads=8))
    with pytest.raises(Unsupported) as caught:
        run(call)
    assert caught.value.argument == "block_table"
    checked(call, backend=None)
