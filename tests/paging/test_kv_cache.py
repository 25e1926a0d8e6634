"""The latent cache: append by slot, gather back, page allocator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.paging import kv_cache as kv_cache_module
from pagedmla.paging.kv_cache import allocate, append, gather
from pagedmla.paging.page_allocator import OutOfPages, PageAllocator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(params=["host", "device"])
def write_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of skipping tokens: by choosing rows, and without asking how many there are (what a GPU runs)."""
    if request.param == "device":
        monkeypatch.setattr(kv_cache_module, "_slots_on_host", lambda kv_cache: False)
    return request.param


@pytest.mark.parametrize("layout", list(DTYPES))
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_tokens_come_back_where_their_slots_are(layout: str, page_size: int, write_path: str) -> None:
    cache = allocate(140 // page_size + 7, page_size, kv_lora_rank=32, qk_rope_head_dim=8, layout=layout)
    cache.fill_(float("nan"))
    lengths = [0, 1, 127, 2]
    width = -(-127 // page_size)
    pages = torch.randperm(cache.shape[0], generator=torch.Generator().manual_seed(1)).int()
    table = torch.full((4, width), -1, dtype=torch.int32)
    used, slots = 0, []
    for row, length in enumerate(lengths):
        count = -(-length // page_size)
        table[row, :count] = pages[used : used + count]
        used += count
        slots += [int(table[row, t // page_size]) * page_size + t % page_size for t in range(length)]
    total = sum(lengths)
    latent, k_pe = torch.randn(total, 32), torch.randn(total, 8)
    # padding in between: -1 must not touch slot -1, which is the pool's last
    padded = torch.full((2 * total,), -1, dtype=torch.int64)
    padded[::2] = torch.tensor(slots)
    append(cache, latent.repeat_interleave(2, 0), k_pe.repeat_interleave(2, 0), padded)
    found = gather(cache, table, torch.tensor(lengths, dtype=torch.int32))
    assert torch.equal(found, torch.cat([latent, k_pe], -1).to(DTYPES[layout]))
    assert int(torch.isfinite(cache).all(-1).sum()) == total


def test_only_skipped_tokens_change_nothing(write_path: str) -> None:
    cache = allocate(2, 4, kv_lora_rank=8, qk_rope_head_dim=2, layout="fp32")
    cache.copy_(torch.randn_like(cache))
    before = cache.clone()
    append(cache, torch.randn(3, 8), torch.randn(3, 2), torch.tensor([-1, 8, -7]))
    assert torch.equal(cache, before)


def test_a_cache_interleaved_across_layers_is_written_in_place() -> None:
    pool = torch.full((5, 3, 4, 10), float("nan"))  # [page, layer, offset, width]
    layer = pool[:, 1]
    append(layer, torch.ones(2, 8), torch.full((2, 2), 2.0), torch.tensor([7, 19]))
    assert torch.equal(pool[1, 1, 3], torch.tensor([1.0] * 8 + [2.0] * 2))
    assert torch.equal(pool[4, 1, 3], torch.tensor([1.0] * 8 + [2.0] * 2))
    assert int(torch.isfinite(pool).all(-1).sum()) == 2


@pytest.mark.parametrize("layout", ["fp8_per_tensor", "fp8_fnuz_per_tensor"])
@pytest.mark.parametrize("scale", [2.0**-7, 0.06, 1.0, 128.0])
def test_fp8_round_trip_is_within_half_a_step_and_never_nan(
    layout: str, scale: float, write_path: str
) -> None:
    cache = allocate(2, 16, kv_lora_rank=16, qk_rope_head_dim=4, layout=layout)
    largest = torch.finfo(cache.dtype).max * scale
    values = torch.randn(20, 20, generator=torch.Generator().manual_seed(0)) * scale * 30
    values[0, :4] = torch.tensor([1e10, -1e10, 0.0, -1e-30])
    append(cache, values[:, :16], values[:, 16:], torch.arange(20), kv_scale=scale)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    found = gather(cache, table, torch.tensor([20], dtype=torch.int32), kv_scale=scale)
    assert found[0, 0] == pytest.approx(largest, rel=1e-6)
    assert found[0, 1] == pytest.approx(-largest, rel=1e-6)
    # 3 explicit mantissa bits: half a step is 2^-4 relative; the smallest subnormal's half is the absolute part
    bound = values.abs() * 2.0**-4 + scale * torch.finfo(cache.dtype).smallest_normal / 8
    clamped = values.clamp(-largest, largest)
    assert ((found - clamped).abs() <= bound).all()


def test_writing_and_reading_with_one_scale_is_not_reading_with_another() -> None:
    cache = allocate(1, 4, kv_lora_rank=8, qk_rope_head_dim=2, layout="fp8_per_tensor")
    append(
        cache, torch.full((1, 8), 3.0), torch.full((1, 2), 3.0), torch.tensor([0]), kv_scale=torch.tensor(0.5)
    )
    table, one = torch.tensor([[0]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    assert (gather(cache, table, one, kv_scale=0.5) == 3.0).all()
    assert (gather(cache, table, one) == 6.0).all()


@pytest.mark.parametrize(
    ("changes", "error", "argument"),
    [
        ({"latent": torch.ones(2, 7)}, InvalidArgument, "latent and k_pe"),
        ({"latent": torch.ones(3, 8)}, InvalidArgument, "latent"),
        ({"latent": torch.ones(2, 8, dtype=torch.int64)}, InvalidArgument, "latent"),
        ({"k_pe": torch.ones(2)}, InvalidArgument, "k_pe"),
        ({"k_pe": None}, InvalidArgument, "latent"),
        ({"slot_mapping": torch.ones(2)}, InvalidArgument, "slot_mapping"),
        ({"slot_mapping": torch.ones(2, 1, dtype=torch.int64)}, InvalidArgument, "slot_mapping"),
        ({"slot_mapping": torch.ones(2, dtype=torch.int64, device="meta")}, InvalidArgument, "slot_mapping"),
        ({"kv_cache": torch.ones(2, 10)}, InvalidArgument, "kv_cache"),
        ({"kv_cache": torch.ones(2, 10, 4).transpose(1, 2)}, InvalidArgument, "kv_cache"),
        ({"kv_cache": torch.ones(2, 4, 10, dtype=torch.float64)}, InvalidArgument, "kv_cache"),
        ({"kv_cache": torch.ones(2, 4, 656, dtype=torch.uint8)}, Unsupported, "kv_cache"),
        ({"kv_scale": 2.0}, InvalidArgument, "kv_scale"),
    ],
)
def test_append_refuses_what_it_cannot_write(changes: dict, error: type[Exception], argument: str) -> None:
    given_ = {
        "kv_cache": torch.zeros(2, 4, 10),
        "latent": torch.ones(2, 8),
        "k_pe": torch.ones(2, 2),
        "slot_mapping": torch.tensor([0, 1]),
        "kv_scale": None,
    } | changes
    scale = given_.pop("kv_scale")
    with pytest.raises(error) as caught:
        append(*given_.values(), kv_scale=scale)
    assert caught.value.argument == argument  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "scale", [0.0, -1.0, float("nan"), 1e-50, 1e300, torch.ones(2), torch.ones(1).double(), "1"]
)
def test_scales_are_checked_in_the_precision_in_which_they_are_used(scale: object) -> None:
    cache = allocate(1, 4, kv_lora_rank=8, qk_rope_head_dim=2, layout="fp8_per_tensor")
    with pytest.raises(InvalidArgument) as caught:
        append(cache, torch.ones(1, 8), torch.ones(1, 2), torch.tensor([0]), kv_scale=scale)  # type: ignore[arg-type]
    assert caught.value.argument == "kv_scale"


@pytest.mark.parametrize(
    ("table", "lengths", "argument"),
    [
        ([[0, 2]], [5], "block_table"),
        ([[0, -1]], [5], "block_table"),
        ([[0, 1]], [9], "seq_lens"),
        ([[0, 1]], [-1], "seq_lens"),
        ([[0, 1]], [1, 1], "seq_lens"),
    ],
)
def test_gather_refuses_what_lies_outside(table: list, lengths: list, argument: str) -> None:
    cache = allocate(2, 4, kv_lora_rank=8, qk_rope_head_dim=2, layout="fp32")
    with pytest.raises(InvalidArgument) as caught:
        gather(cache, torch.tensor(table, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [((-1, 4), "bf16"), ((1, 0), "bf16"), ((1, 2.0), "bf16"), ((1, 4), "int8"), ((1, True), "bf16")],
)
def test_allocate_refuses_sizes_and_layouts_that_are_none(sizes: tuple, layout: str) -> None:
    with pytest.raises(InvalidArgument):
        allocate(*sizes, layout=layout)
    with pytest.raises(Unsupported):
        allocate(1, 64, layout="fp8_ds_mla")


@given(
    st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "grow"]), st.integers(0, 9)), max_size=40)
)
def test_pages_are_neither_lost_nor_given_twice(moves: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(6)
    held: list[int] = []
    for move, number in moves:
        if move == "take":
            if number > allocator.num_free:
                free = allocator.num_free
                with pytest.raises(OutOfPages):
                    allocator.allocate(number)
                assert allocator.num_free == free
            else:
                fresh = allocator.allocate(number)
                assert len(set(fresh)) == number
                assert not set(fresh) & set(held)
                held += fresh
        elif move == "share" and held:
            allocator.retain([held[number % len(held)]])
            held.append(held[number % len(held)])
        elif move == "drop" and held:
            allocator.release([held.pop(number % len(held))])
        elif move == "grow":
            allocator.grow(allocator.num_pages + number)
        assert all(allocator.reference_count(page) == held.count(page) for page in range(allocator.num_pages))
        assert allocator.num_free == allocator.num_pages - len(set(held))


def test_the_allocator_refuses_what_is_not_held() -> None:
    allocator = PageAllocator(2)
    (page,) = allocator.allocate(1)
    allocator.release([page])
    for call in (
        lambda: allocator.release([page]),
        lambda: allocator.retain([page]),
        lambda: allocator.release([5]),
        lambda: allocator.allocate(-1),
        lambda: allocator.grow(1),
    ):
        with pytest.raises(InvalidArgument):
            call()
