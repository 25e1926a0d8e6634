"""``generate`` on an enabled model against stock Transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedmla.integrations.transformers import PagedLatentCache, enable

LONG = {"deepseek_v3_yarn": 131, "deepseek_v3": 127, "deepseek_v2": 127}
"""New tokens by family; 40 for the others."""


def test_greedy_text_of_a_left_padded_batch(
    family: str, tiny_model: Callable, padded_prompts: Callable, generate: Callable, assert_same: Callable
) -> None:
    model, inputs, new_tokens = tiny_model(family), padded_prompts((37, 20, 5)), LONG.get(family, 40)
    stock = generate(model, inputs, new_tokens)
    ours = generate(enable(model), inputs, new_tokens)
    assert isinstance(ours.cache, PagedLatentCache)
    assert_same(ours, stock)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("new_tokens", [127, 131])
def test_page_sizes(
    page_size: int,
    new_tokens: int,
    tiny_model: Callable,
    padded_prompts: Callable,
    generate: Callable,
    assert_same: Callable,
) -> None:
    model, inputs = tiny_model("deepseek_v3_yarn"), padded_prompts((1,))
    stock = generate(model, inputs, new_tokens)
    cache = PagedLatentCache(model.config, page_size=page_size)
    ours = generate(enable(model), inputs, new_tokens, cache=cache)
    assert ours.cache is cache
    assert_same(ours, stock)
    # the last token was generated, and not yet shown to the model
    assert cache.store.table.lengths == [new_tokens]


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_stock_caches_are_absorbed_too(
    implementation: str,
    family: str,
    tiny_model: Callable,
    padded_prompts: Callable,
    generate: Callable,
    assert_same: Callable,
) -> None:
    model, inputs = tiny_model(family), padded_prompts((11, 4))
    stock = generate(model, inputs, 17)
    ours = generate(enable(model), inputs, 17, cache_implementation=implementation)
    assert not isinstance(ours.cache, PagedLatentCache)
    assert_same(ours, stock)


def test_a_static_cache_that_the_prompt_fills(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable, assert_same: Callable
) -> None:
    model, inputs = tiny_model("deepseek_v3"), padded_prompts((9, 3))
    stock = generate(model, inputs, 1)
    assert_same(generate(enable(model), inputs, 1, cache_implementation="static"), stock)


def test_right_padding(
    family: str, tiny_model: Callable, padded_prompts: Callable, generate: Callable, assert_same: Callable
) -> None:
    """Generation continues from the LAST position, a pad that sees all real tokens before it."""
    model, inputs = tiny_model(family), padded_prompts((21, 13, 1), side="right")
    stock = generate(model, inputs, 20)
    assert_same(generate(enable(model), inputs, 20), stock)


FEATURES: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 4},
    "beam search, several returned": {"num_beams": 4, "num_return_sequences": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "sampling, several returned": {"do_sample": True, "num_return_sequences": 3, "temperature": 0.8},
    "chunked prefill": {"prefill_chunk_size": 8},
    "contrasting penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "deepseek_v2", "kimi_linear"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("page_size", [4])
def test_ways_of_generating(
    feature: str,
    name: str,
    page_size: int,
    tiny_model: Callable,
    padded_prompts: Callable,
    generate: Callable,
    assert_same: Callable,
) -> None:
    model, inputs = tiny_model(name), padded_prompts((19, 6))
    torch.manual_seed(7)
    stock = generate(model, inputs, 24, **FEATURES[feature])
    enable(model)
    torch.manual_seed(7)
    cache = PagedLatentCache(model.config, page_size=page_size)
    assert_same(generate(model, inputs, 24, cache=cache, **FEATURES[feature]), stock)


@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "deepseek_v2"])
def test_prompt_lookup(
    name: str, tiny_model: Callable, padded_prompts: Callable, generate: Callable, assert_same: Callable
) -> None:
    """Several tokens a step, and a crop after each."""
    model, inputs = tiny_model(name), padded_prompts((8,))
    # the same eight tokens three times over, so that something is found to propose
    inputs = {name: tensor.repeat(1, 3) for name, tensor in inputs.items()}
    stock = generate(model, inputs, 30, prompt_lookup_num_tokens=5)
    assert_same(generate(enable(model), inputs, 30, prompt_lookup_num_tokens=5), stock)


@pytest.mark.parametrize("assistant_is_enabled", [False, True])
def test_assisted_decoding(
    assistant_is_enabled: bool,
    tiny_model: Callable,
    padded_prompts: Callable,
    generate: Callable,
    assert_same: Callable,
) -> None:
    model, assistant = tiny_model("deepseek_v3_yarn"), tiny_model("deepseek_v3_yarn", seed=0)
    with torch.no_grad():
        # close enough to agree now and then, different enough to be rejected as well
        assistant.lm_head.weight.add_(0.05 * torch.randn(assistant.lm_head.weight.shape))
    inputs = padded_prompts((12,))
    stock = generate(model, inputs, 30, assistant_model=assistant)
    if assistant_is_enabled:
        enable(assistant)
    ours = generate(enable(model), inputs, 30, assistant_model=assistant)
    assert_same(ours, stock)


def two_turns(model: Any, generate: Callable, first: dict, more: dict, cache: Any) -> Any:
    """Generates, appends ``more`` to what came out, and generates on with the same cache."""
    turn = generate(model, first, 11, cache=cache)
    ids = torch.cat([turn.tokens, more["input_ids"]], dim=1)
    real = torch.ones(2, 11 + 9, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.cat([first["attention_mask"], real], dim=1)}
    return generate(model, inputs, 11, cache=turn.cache)


@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "deepseek_v2"])
def test_second_turn_on_the_same_cache(
    name: str, tiny_model: Callable, padded_prompts: Callable, generate: Callable, assert_same: Callable
) -> None:
    model = tiny_model(name)
    first, more = padded_prompts((15, 7)), padded_prompts((9, 9), seed=2)
    stock = two_turns(model, generate, first, more, None)
    enable(model)
    for page_size in (1, 5, 64):
        cache = PagedLatentCache(model.config, page_size=page_size)
        assert_same(two_turns(model, generate, first, more, cache), stock)
        assert cache.store.table.lengths == [15 + 11 + 9 + 11 - 1, 7 + 11 + 9 + 11 - 1]


@pytest.mark.parametrize("absorb_below", [0, 1, 2, 10**9])
def test_expanding_and_absorbing_agree(
    absorb_below: int,
    tiny_model: Callable,
    padded_prompts: Callable,
    generate: Callable,
    assert_same: Callable,
) -> None:
    """Every forward expanded (0), only one-token forwards absorbed (2), every forward absorbed (10**9)."""
    model, inputs = tiny_model("deepseek_v3_yarn"), padded_prompts((19, 1, 6))
    options = {"prefill_chunk_size": 5}
    stock = generate(model, inputs, 12, **options)
    enable(model, absorb_below=absorb_below)
    assert_same(generate(model, inputs, 12, **options), stock)
    assert_same(generate(model, inputs, 12, cache_implementation="dynamic"), stock)
