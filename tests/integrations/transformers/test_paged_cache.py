"""What a ``PagedLatentCache`` stores, shares, frees and answers."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pagedmla
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.integrations.transformers import PagedLatentCache, enable
from pagedmla.integrations.transformers.latent_store import PagedStep
from pagedmla.integrations.transformers.sequence_table import SequenceTable
from pagedmla.integrations.transformers.versions import CROP_KEEPS, CROP_REFUSES, meaning_of_positive_crop

LAYERS, TOKEN_BYTES = 2, (64 + 16) * 4


@pytest.fixture
def filled(
    tiny_model: Callable, padded_prompts: Callable, cache_keyword: Callable
) -> Callable[..., tuple[Any, Any]]:
    """``filled(lengths, page_size)``: an enabled model and a cache that holds a padded batch."""

    def make(lengths: tuple[int, ...] = (10, 3), page_size: int = 4, **changes: Any) -> tuple[Any, Any]:
        model = enable(tiny_model("deepseek_v3_yarn", **changes))
        cache = PagedLatentCache(model.config, page_size=page_size)
        with torch.no_grad():
            model(**padded_prompts(lengths), **{cache_keyword(model): cache})
        return model, cache

    return make


@pytest.fixture
def next_logits(cache_keyword: Callable) -> Callable[..., torch.Tensor]:
    """``next_logits(model, cache, tokens)``: shows tokens [num_rows, n], all real, and returns the last logits."""

    @torch.no_grad()
    def run(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        real = torch.ones(tokens.shape[0], cache.get_seq_length() + tokens.shape[1], dtype=torch.long)
        if isinstance(cache, PagedLatentCache) and cache.store.table.real is not None:
            real[:, : cache.get_seq_length()] = cache.store.table.real.long()
        positions = (real.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        inputs = {"attention_mask": real, "position_ids": positions, cache_keyword(model): cache}
        return model(tokens, **inputs).logits[:, -1]

    return run


def test_padding_is_not_stored(filled: Callable) -> None:
    _, cache = filled((37, 20, 5), page_size=4)
    assert cache.get_seq_length() == 37
    assert cache.store.table.lengths == [37, 20, 5]
    assert cache.bytes_per_token() == LAYERS * TOKEN_BYTES
    assert cache.bytes_used() == (37 + 20 + 5) * LAYERS * TOKEN_BYTES
    assert cache.bytes_allocated() == (10 + 5 + 2) * 4 * LAYERS * TOKEN_BYTES


def test_bytes_per_token_before_the_first_token_comes_from_the_configuration(tiny_model: Callable) -> None:
    config = tiny_model("deepseek_v3").config
    config.dtype = torch.bfloat16
    cache = PagedLatentCache(config)
    assert (cache.bytes_per_token(), cache.bytes_used(), cache.bytes_allocated()) == (LAYERS * 80 * 2, 0, 0)


def test_only_the_paged_layers_of_a_hybrid_count(tiny_model: Callable) -> None:
    assert PagedLatentCache(tiny_model("kimi_linear").config).bytes_per_token() == 1 * TOKEN_BYTES


def test_the_steps_metadata_is_made_once_for_all_layers(
    filled: Callable, next_logits: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = filled((10, 3))
    made = []
    append = SequenceTable.append

    def counting(table: SequenceTable, *args: Any) -> Any:
        made.append(append(table, *args))
        return made[-1]

    monkeypatch.setattr(SequenceTable, "append", counting)
    tables = []
    decode = pagedmla.decode

    def watching(q: Any, pool: Any, block_table: torch.Tensor, seq_lens: torch.Tensor, **kwargs: Any) -> Any:
        tables.append((block_table, seq_lens))
        return decode(q, pool, block_table, seq_lens, **kwargs)

    monkeypatch.setattr(pagedmla, "decode", watching)
    for step in range(1, 4):
        next_logits(model, cache, torch.tensor([[5], [6]]))
        assert len(made) == step
        assert len(tables) == step * LAYERS
        assert tables[-1][0] is tables[-2][0]
        assert tables[-1][1] is tables[-2][1]


def test_rows_share_pages_and_part_when_they_write(filled: Callable, next_logits: Callable) -> None:
    model, cache = filled((10,), page_size=4)
    alone = copy.deepcopy(cache)
    cache.batch_repeat_interleave(3)
    used = cache.store.table.allocator.num_pages - cache.store.table.allocator.num_free
    assert (cache.batch_size, used) == (3, 3)
    assert cache.bytes_used() == 10 * LAYERS * TOKEN_BYTES
    together = next_logits(model, cache, torch.tensor([[5], [6], [7]]))
    for row, token in enumerate((5, 6, 7)):
        torch.testing.assert_close(
            together[row],
            next_logits(model, copy.deepcopy(alone), torch.tensor([[token]]))[0],
            rtol=0,
            atol=1e-5,
        )
    # two full pages shared by all, a last one for each
    assert cache.store.table.allocator.num_pages - cache.store.table.allocator.num_free == 2 + 3
    assert cache.bytes_used() == (8 + 3 * 3) * LAYERS * TOKEN_BYTES


def test_beam_search_leaves_no_page_behind(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    model = enable(tiny_model("deepseek_v3_yarn"))
    cache = PagedLatentCache(model.config, page_size=4)
    generate(model, padded_prompts((9, 5)), 20, cache=cache, num_beams=4)
    table = cache.store.table
    held = {page for pages in table.pages for page in pages}
    assert table.allocator.num_pages - table.allocator.num_free == len(held)
    # the beams of a prompt descend from one another, and hold their common tokens once
    assert table.num_stored_tokens < sum(table.lengths)


def test_reset_frees_every_page_and_the_cache_starts_anew(filled: Callable, next_logits: Callable) -> None:
    model, cache = filled((10, 3))
    allocated = cache.bytes_allocated()
    cache.reset()
    table = cache.store.table
    assert table.allocator.num_free == table.allocator.num_pages
    assert (cache.get_seq_length(), cache.bytes_used(), cache.batch_size) == (0, 0, -1)
    assert not cache.is_initialized
    tokens = torch.randint(3, 199, (3, 6), generator=torch.Generator().manual_seed(1))
    again = next_logits(model, cache, tokens)
    fresh = next_logits(model, PagedLatentCache(model.config, page_size=4), tokens)
    assert torch.equal(again, fresh)
    assert cache.bytes_allocated() == max(allocated, 6 * 4 * LAYERS * TOKEN_BYTES)


def test_what_pages_held_before_changes_no_bit(
    tiny_model: Callable, padded_prompts: Callable, next_logits: Callable, cache_keyword: Callable
) -> None:
    """NaN in every slot that no row owns: the tails of last pages, and the pages still free."""
    model = enable(tiny_model("deepseek_v3_yarn"))
    cache = PagedLatentCache(model.config, page_size=4, num_pages=64)
    with torch.no_grad():
        model(**padded_prompts((10, 3)), **{cache_keyword(model): cache})
    poisoned = copy.deepcopy(cache)
    table = poisoned.store.table
    owned = torch.zeros(64 * 4, dtype=torch.bool)
    for pages, length in zip(table.pages, table.lengths, strict=True):
        for index in range(length):
            owned[pages[index // 4] * 4 + index % 4] = True
    for pool in poisoned.store.pools.values():
        pool.view(-1, pool.shape[-1])[~owned] = torch.nan
    for tokens in (torch.tensor([[5], [6]]), torch.arange(3, 3 + 2 * 59).view(2, 59)):
        # one token: absorbed; fifty-nine: expanded out of the pages
        ours = next_logits(model, poisoned, tokens)
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, next_logits(model, cache, tokens))
    assert table.allocator.num_pages == 64


@pytest.mark.parametrize("count", [1, 3, 6, 7, 10])
def test_crop_forgets(count: int, filled: Callable, next_logits: Callable) -> None:
    model, cache = filled((10, 6), page_size=4)
    kept = copy.deepcopy(cache)
    kept.store.table.crop(count)
    cache.crop(-count)
    assert cache.get_seq_length() == 10 - count
    assert cache.store.table.lengths == [10 - count, max(6 - count, 0)]
    tokens = torch.tensor([[8], [9]])
    expected = next_logits(model, kept, tokens)
    next_logits(model, cache, torch.tensor([[5, 6, 7], [5, 6, 7]]))
    cache.crop(-3)
    cache.crop(0)
    torch.testing.assert_close(next_logits(model, cache, tokens), expected, rtol=0, atol=1e-6)


def test_crop_by_a_positive_number_means_what_it_means_to_the_installed_release(filled: Callable) -> None:
    _, cache = filled((10, 6))
    if meaning_of_positive_crop() == CROP_REFUSES:
        with pytest.raises(InvalidArgument) as refused:
            cache.crop(4)
        assert refused.value.argument == "tokens_to_remove"
        assert cache.get_seq_length() == 10
    else:
        assert meaning_of_positive_crop() == CROP_KEEPS
        cache.crop(7)
        assert cache.store.table.lengths == [7, 3]
        cache.crop(50)
        assert cache.get_seq_length() == 7


@pytest.mark.parametrize(
    ("indices", "rows"),
    [(torch.tensor([2, 0]), [2, 0]), (torch.tensor([True, False, True]), [0, 2])],
    ids=["numbers", "mask"],
)
def test_select_rows(indices: torch.Tensor, rows: list[int], filled: Callable, next_logits: Callable) -> None:
    model, cache = filled((10, 6, 3))
    whole = copy.deepcopy(cache)
    cache.batch_select_indices(indices)
    tokens = torch.tensor([[7], [8], [9]])
    ours = next_logits(model, cache, tokens[rows])
    torch.testing.assert_close(ours, next_logits(model, whole, tokens)[rows], rtol=0, atol=1e-5)


def test_copies_and_pickles_are_caches_of_their_own(filled: Callable, next_logits: Callable) -> None:
    model, cache = filled((10, 3))
    expected = next_logits(model, copy.deepcopy(cache), torch.tensor([[5], [6]]))
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        next_logits(model, copied, torch.tensor([[9], [9]]))
        assert copied.get_seq_length() == 11
    assert cache.get_seq_length() == 10
    assert torch.equal(next_logits(model, cache, torch.tensor([[5], [6]])), expected)


def test_what_transformers_asks_of_a_cache(filled: Callable) -> None:
    _, cache = filled((10, 3))
    assert len(cache) == LAYERS
    assert cache.get_mask_sizes(4, 0) == (14, 0)
    assert cache.get_max_length() == -1
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.is_initialized
    assert cache.is_sliding == [False, False]
    assert (cache.batch_size, cache.page_size) == (2, 4)
    cache.activate_past_recording()


def test_reserved_pages_are_used_before_the_pool_grows(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    model = enable(tiny_model("deepseek_v3"))
    cache = PagedLatentCache(model.config, page_size=8, num_pages=10)
    generate(model, padded_prompts((9, 5)), 20, cache=cache)
    assert cache.bytes_allocated() == 10 * 8 * LAYERS * TOKEN_BYTES


def test_a_cache_is_of_one_model(filled: Callable, tiny_model: Callable, next_logits: Callable) -> None:
    _, cache = filled((10, 3))
    other = enable(tiny_model("minicpm3", kv_lora_rank=32))
    with pytest.raises(InvalidArgument) as refused:
        next_logits(other, cache, torch.tensor([[5], [6]]))
    assert (refused.value.code, refused.value.argument) == ("latent", "cache")


def test_steps_are_freed_as_they_end(filled: Callable, next_logits: Callable) -> None:
    """A step's tensors go with it, not with a later collection of garbage."""
    model, cache = filled((10, 3))
    next_logits(model, cache, torch.tensor([[5], [6]]))
    gc.collect()
    gc.disable()
    try:
        before = sum(type(thing) is PagedStep for thing in gc.get_objects())
        for _ in range(5):
            next_logits(model, cache, torch.tensor([[5], [6]]))
        assert sum(type(thing) is PagedStep for thing in gc.get_objects()) == before
    finally:
        gc.enable()


def test_linear_layers_of_a_hybrid_refuse_what_they_cannot_do(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    model = enable(tiny_model("kimi_linear"))
    cache = PagedLatentCache(model.config)
    generate(model, padded_prompts((9, 4)), 3, cache=cache)
    shown = cache.get_seq_length()
    with pytest.raises(Unsupported) as refused:
        cache.batch_repeat_interleave(2)
    assert refused.value.code == "batch_repeat_interleave"
    with pytest.raises(RuntimeError):
        cache.crop(-1)
    # and nothing of ours changed before they did
    assert (cache.get_seq_length(), cache.batch_size) == (shown, 2)


def test_iteration_and_offloading_are_refused(filled: Callable) -> None:
    _, cache = filled((10, 3))
    with pytest.raises(Unsupported) as iteration:
        list(cache)
    with pytest.raises(Unsupported) as offloading:
        cache.layers[0].offload()
    assert (iteration.value.code, offloading.value.code) == ("iteration", "offloading")
