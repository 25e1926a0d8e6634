"""NUM: in the invariant mode a row's bits are its own; in all modes process-wide settings and large scores do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import Batch, arguments, check, decode, make_batch, run, same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches, seeds

import pagedmla
from pagedmla.contract.errors import Unsupported

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MODES: list[dict[str, Any]] = [{}, {"num_kv_splits": 3}, {"batch_invariant": True}]


def joined(one: Batch, two: Batch) -> Batch:
    """Both batches as one."""
    return replace(one, queries=one.queries + two.queries, tokens=one.tokens + two.tokens)


@given(st.data())
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from((1, 4, 16)))
    batch = data.draw(batches(16, max_q_len=3, max_seqs=3, most=300, num_heads=heads))
    others = data.draw(batches(16, max_q_len=5, max_seqs=4, most=700, num_heads=heads, seed=data.draw(seeds)))
    everyone = joined(batch, others)
    order = data.draw(st.permutations(range(len(everyone.tokens))))
    shuffled = everyone.take(order)
    alone, together = decode(batch, batch_invariant=True), decode(shuffled, batch_invariant=True)
    for place, sequence in enumerate(order):
        if sequence < len(batch.tokens):
            mine, there = batch.rows(sequence), shuffled.rows(place)
            assert same_bits((alone[0][mine], alone[1][mine]), (together[0][there], together[1][there]))


@pytest.mark.parametrize("size", [2, 3, 17, 33])
def test_batch_size(size: int) -> None:
    """Real dimensions, where matrix products switch kernels with the number of rows."""
    batch = make_batch([300, *[37] * (size - 1)], num_heads=16, dims=(512, 64))
    first = decode(batch.take([0]), 64, batch_invariant=True)
    out, lse = decode(batch, 64, batch_invariant=True)
    assert same_bits(first, (out[:1], lse[:1]))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 8, 12, 15, 16, 17, 31, 33, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_heads_are_inert(num_heads: int, dtype: torch.dtype) -> None:
    """Heads added to fill a tile change no bit of the others, whatever they hold."""
    batch = make_batch([131, 5], [1, 2], num_heads=num_heads, dims=(64, 16), q_dtype=dtype)
    generator = torch.Generator().manual_seed(8)
    call = arguments(batch)
    alone = run(call, batch_invariant=True)
    for extra, fill in ((1, 1.0), (16 - num_heads % 16, 0.0), (47, 1.0)):
        padding = fill * torch.randn(3, extra, 80, generator=generator)
        padded = call | {"q": torch.cat([call["q"], padding.to(dtype)], dim=1)}
        out, lse = run(padded, batch_invariant=True)
        assert same_bits(alone, (out[:, :num_heads], lse[:, :num_heads]))


def test_head_order_is_inert() -> None:
    call = arguments(make_batch([131, 5], [1, 2], num_heads=7))
    order = [3, 0, 6, 1, 5, 2, 4]
    out, lse = run(call, batch_invariant=True)
    moved = run(call | {"q": call["q"][:, order]}, batch_invariant=True)
    assert same_bits((out[:, order], lse[:, order]), moved)


def test_the_width_of_the_table_is_inert_in_the_invariant_mode() -> None:
    batch = make_batch([131, 5], [1, 2], num_heads=7)
    narrow = decode(batch, layout={"spare_columns": 0}, batch_invariant=True)
    wide = decode(batch, layout={"spare_columns": 300}, batch_invariant=True)
    assert same_bits(narrow, wide)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_half_precision(dtype: torch.dtype, mode: dict[str, Any]) -> None:
    """Scores past 65504, positive and negative, by margins that leave one key or two equal ones."""
    batch = make_batch([40, 131, 3], num_heads=2, q_dtype=dtype)
    for sequence, keys in enumerate(batch.tokens):
        keys[:, -1] = torch.arange(len(keys)).to(dtype) % 4 * 64 - 96
        batch.queries[sequence][..., -1] = 6000.0
    call = arguments(batch)
    scores = batch.softmax_scale * batch.queries[0][0].double() @ batch.tokens[0].double().T
    assert scores.max() > 65504
    assert scores.min() < -65504
    check(run(call, **mode), call)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_scores_far_below_zero(mode: dict[str, Any]) -> None:
    """A running maximum must start at minus infinity, not at 0 or at -1e4."""
    batch = make_batch([40, 131], num_heads=2, q_dtype=torch.float32, spread=0.5)
    for sequence, keys in enumerate(batch.tokens):
        keys[:, -1] = -256.0
        batch.queries[sequence][..., -1] = 4096.0
    call = arguments(batch)
    check(run(call, **mode), call)
    assert run(call, **mode)[1].max() < -1e5


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_changes_no_bit(dtype: torch.dtype, mode: dict[str, Any]) -> None:
    call = arguments(make_batch([131, 0, 17], [1, 2, 3], num_heads=4, q_dtype=dtype))
    plain = run(call, **mode)
    for cast_to in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", cast_to):
            assert same_bits(plain, run(call, **mode))


@pytest.mark.parametrize("cast_to", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_changes_no_bit_of_a_merge(dtype: torch.dtype, cast_to: torch.dtype) -> None:
    out, lse = run(arguments(make_batch([131, 0, 17], [1, 2, 3], num_heads=4, q_dtype=dtype)))
    plain = pagedmla.merge_states([out, out], [lse, lse])
    stacked, stacked_lse = torch.stack([out, out]), torch.stack([lse, lse])
    with torch.autocast("cpu", cast_to):
        assert same_bits(plain, pagedmla.merge_states([out, out], [lse, lse]))
        assert same_bits(plain, pagedmla.merge_states(stacked, stacked_lse))


@pytest.fixture
def _default_dtype_restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_default_dtype_restored")
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_default_dtype_does_not_matter(
    default: torch.dtype, mode: dict[str, Any], kv_dtype: torch.dtype
) -> None:
    call = arguments(make_batch([131, 0, 17], [1, 2, 3], num_heads=4, kv_dtype=kv_dtype))
    plain = run(call, **mode)
    merged = pagedmla.merge_states([plain[0]] * 2, [plain[1]] * 2)
    torch.set_default_dtype(default)
    assert same_bits(plain, run(call, **mode))
    assert same_bits(merged, pagedmla.merge_states([plain[0]] * 2, [plain[1]] * 2))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_default_device_does_not_matter(mode: dict[str, Any]) -> None:
    """Temporaries live where the tensors live; meta stands for a device that is not theirs."""
    call = arguments(make_batch([131, 0, 17], [1, 2, 3], num_heads=4))
    plain = run(call, **mode)
    with torch.device("meta"):
        assert same_bits(plain, run(call, **mode))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_inference_mode_and_no_grad(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([131, 0, 17], [1, 2, 3], num_heads=4))
    plain = run(call, **mode)
    with torch.inference_mode():
        inside = run(call, **mode)
        out, lse = torch.empty_like(plain[0]), torch.empty_like(plain[1])
        run(call, out=out, lse=lse, **mode)
    assert same_bits(plain, inside)
    assert same_bits(plain, (out, lse))
    with torch.no_grad():
        assert same_bits(plain, run(call | {"q": call["q"].clone().requires_grad_()}, **mode))


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_training_is_refused(name: str) -> None:
    """There is no backward pass; a result cut off from the graph would train nothing, silently."""
    call = arguments(make_batch([20, 3], q_dtype=torch.float32), poison="finite")
    with pytest.raises(Unsupported) as caught:
        run(call | {name: call[name].clone().requires_grad_()})
    assert caught.value.argument == name


def test_training_is_refused_for_each_part_of_a_pair() -> None:
    call = arguments(make_batch([20, 3], q_dtype=torch.float32))
    latent, rope = call["q"][..., :32].clone(), call["q"][..., 32:].clone()
    for pair in ((latent.clone().requires_grad_(), rope), (latent, rope.clone().requires_grad_())):
        with pytest.raises(Unsupported):
            run(call, q=pair)
