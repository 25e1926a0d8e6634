"""Enabling, disabling, and what else may be done to a model in between."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import pagedmla
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.integrations.transformers import PagedLatentCache, disable, enable, is_enabled
from pagedmla.integrations.transformers.modules import ATTENTION_NAME, find_mla_modules


def traces(model: nn.Module) -> list[str]:
    """Attributes of the model's modules that enabling left behind."""
    own = [(module, name) for module in model.modules() for name in vars(module)]
    return [
        name
        for _, name in own
        if "pagedmla" in name or name in ("expand_kv", "_prepare_cache_for_generation")
    ]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_disable_restores_everything(
    implementation: str, tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    model, inputs = tiny_model("deepseek_v3_yarn", attn_implementation=implementation), padded_prompts((9, 4))
    stock = generate(model, inputs, 12)
    assert model.config._attn_implementation == implementation
    assert enable(model) is model
    assert is_enabled(model)
    assert model.config._attn_implementation == ATTENTION_NAME
    generate(model, inputs, 12)
    assert disable(model) is model
    assert not is_enabled(model)
    assert traces(model) == []
    assert model.config._attn_implementation == implementation
    again = generate(model, inputs, 12)
    assert torch.equal(again.logprobs, stock.logprobs)
    assert type(again.cache) is DynamicCache


def test_enabling_twice_and_disabling_twice(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    model, inputs = tiny_model("deepseek_v2"), padded_prompts((9, 4))
    stock = generate(model, inputs, 8)
    enable(enable(model))
    assert generate(model, inputs, 8).tokens.tolist() == stock.tokens.tolist()
    disable(model)
    assert traces(model) == []
    assert model.config._attn_implementation == "sdpa"
    disable(model)
    assert torch.equal(generate(model, inputs, 8).logprobs, stock.logprobs)


def test_the_inner_model_alone_can_be_switched(tiny_model: Callable) -> None:
    model = tiny_model("deepseek_v3")
    enable(model.model)
    assert is_enabled(model)
    enable(model)
    disable(model.model)
    assert not is_enabled(model)
    assert model.config._attn_implementation == "sdpa"
    disable(model)
    assert traces(model) == []


def test_two_models_side_by_side(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable, assert_same: Callable
) -> None:
    models = [tiny_model("deepseek_v3_yarn"), tiny_model("minicpm3"), tiny_model("deepseek_v3_yarn", seed=3)]
    inputs = padded_prompts((9, 4))
    stock = [generate(model, inputs, 10) for model in models]
    enable(models[0], absorb_below=0)
    enable(models[1], absorb_below=10**6)
    for model, expected in zip(models, stock, strict=True):
        assert_same(generate(model, inputs, 10), expected)
    disable(models[0])
    for model, expected in zip(models, stock, strict=True):
        assert_same(generate(model, inputs, 10), expected)
    assert [is_enabled(model) for model in models] == [False, True, False]


@pytest.mark.parametrize(
    "copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_are_enabled_models_of_their_own(
    copied_by: Callable,
    tiny_model: Callable,
    padded_prompts: Callable,
    generate: Callable,
    assert_same: Callable,
) -> None:
    model, inputs = tiny_model("deepseek_v3_yarn"), padded_prompts((9, 4))
    stock = generate(model, inputs, 10)
    copied = copied_by(enable(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    disable(model)
    assert is_enabled(copied)
    ours = generate(copied, inputs, 10)
    assert isinstance(ours.cache, PagedLatentCache)
    assert_same(ours, stock)
    disable(copied)
    assert traces(copied) == []
    assert copied.config._attn_implementation == "sdpa"
    assert_same(generate(copied, inputs, 10), stock)


def test_nothing_of_it_is_saved(tiny_model: Callable, tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path / "stock")
    enable(model).save_pretrained(tmp_path / "enabled")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "enabled")]
    assert configs[0] == configs[1]
    assert "pagedmla" not in (tmp_path / "enabled" / "config.json").read_text()


def test_generate_makes_a_paged_cache_unless_told_otherwise(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    model, inputs = enable(tiny_model("deepseek_v3")), padded_prompts((9, 4))
    assert type(generate(model, inputs, 3).cache) is PagedLatentCache
    assert type(generate(model, inputs, 3, cache_implementation="dynamic").cache) is DynamicCache
    own = DynamicCache(config=model.config)
    assert generate(model, inputs, 3, cache=own).cache is own
    assert generate(model, inputs, 3, use_cache=False).cache is None


def test_a_replaced_preparation_of_caches_is_left_alone(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    model = tiny_model("deepseek_v3")
    stock = type(model)._prepare_cache_for_generation
    model._prepare_cache_for_generation = lambda *args, **kwargs: stock(model, *args, **kwargs)
    theirs = model._prepare_cache_for_generation
    enable(model)
    assert type(generate(model, padded_prompts((5,)), 3).cache) is DynamicCache
    disable(model)
    assert model._prepare_cache_for_generation is theirs


def test_an_implementation_chosen_since_stays(tiny_model: Callable) -> None:
    model = enable(tiny_model("deepseek_v3"))
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(InvalidArgument) as misused:
        model(ids)
    assert misused.value.code == "not_enabled"
    disable(model)
    assert model.config._attn_implementation == "eager"
    model(ids)


def test_a_paged_cache_on_a_model_that_is_not_enabled(
    family: str, tiny_model: Callable, cache_keyword: Callable
) -> None:
    model = tiny_model(family)
    with pytest.raises(InvalidArgument) as misused, torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), **{cache_keyword(model): PagedLatentCache(model.config)})
    assert misused.value.code == "not_enabled"
    assert "enable" in str(misused.value)


class WithTower(nn.Module):
    """A language model beside another one, as vision towers stand, and an adapter's wrapper around both."""

    def __init__(self, language_model: PreTrainedModel, tower: PreTrainedModel) -> None:
        super().__init__()
        self.language_model, self.tower = language_model, tower


def tiny_llama() -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=199, **sizes)).eval()


def test_other_models_inside_a_wrapper_keep_their_attention(tiny_model: Callable) -> None:
    both = WithTower(tiny_model("deepseek_v3"), tiny_llama())
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        stock = both.tower(ids).logits
        enable(both)
        assert both.tower.config._attn_implementation == "sdpa"
        assert both.language_model.config._attn_implementation == ATTENTION_NAME
        assert torch.equal(both.tower(ids).logits, stock)
    disable(both)
    assert traces(both) == []


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_vision_tower_keeps_its_attention(
    implementation: str,
    padded_prompts: Callable,
    generate: Callable,
    assert_same: Callable,
    tiny_config: Callable,
) -> None:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = Mistral3Config(text_config=tiny_config("Mistral4Config").to_dict(), vision_config=vision)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = Mistral3ForConditionalGeneration(config).eval()
    towers = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    before = [m.config._attn_implementation for m in towers]
    inputs = padded_prompts((9, 4))
    stock = generate(model, inputs, 10)
    ours = generate(enable(model), inputs, 10)
    assert type(ours.cache) is PagedLatentCache
    assert_same(ours, stock)
    changed = [type(m).__name__ for m in towers if m.config._attn_implementation == ATTENTION_NAME]
    assert changed == ["Mistral4Model"]
    disable(model)
    assert [m.config._attn_implementation for m in towers] == before
    assert traces(model) == []


def test_ordinary_attention_under_our_name_is_sdpa(padded_prompts: Callable) -> None:
    """Where an attention that is not MLA reads the same configuration, it gets SDPA and a real mask."""
    model, prompts = tiny_llama(), padded_prompts((9, 4))
    real = prompts["attention_mask"].bool()
    with torch.no_grad():
        stock = model(**prompts).logits
        model.set_attn_implementation(ATTENTION_NAME)
        torch.testing.assert_close(model(**prompts).logits[real], stock[real], rtol=0, atol=1e-6)


def test_the_backend_is_passed_on(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[Any] = []
    decode = pagedmla.decode

    def watching(*args: Any, **kwargs: Any) -> Any:
        named.append(kwargs["backend"])
        return decode(*args, **kwargs)

    monkeypatch.setattr(pagedmla, "decode", watching)
    generate(enable(tiny_model("deepseek_v3"), backend="torch"), padded_prompts((5,)), 3)
    assert named
    assert set(named) == {"torch"}


def test_a_failed_enable_changes_nothing(tiny_model: Callable) -> None:
    model = tiny_model("deepseek_v3")
    modules: list[Any] = find_mla_modules(model)
    modules[1].sinks = torch.zeros(4)
    with pytest.raises(Unsupported):
        enable(model)
    assert traces(model) == []
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_takes_no_attention_function_leaves_its_neighbour_unchanged(
    tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = WithTower(tiny_model("deepseek_v3"), tiny_model("deepseek_v2"))
    # as Transformers does for models outside its attention interface: a warning, and nothing set
    monkeypatch.setattr(both.tower.model, "set_attn_implementation", lambda name: None)
    with pytest.raises(Unsupported) as refused:
        enable(both)
    monkeypatch.undo()
    assert refused.value.code == "attention_interface"
    assert traces(both) == []
    assert both.language_model.config._attn_implementation == "sdpa"


def test_an_enabled_model_is_freed_with_its_last_user(tiny_model: Callable) -> None:
    """Gigabytes should not wait for the garbage collector: whatever stock models do, enabled ones do."""
    gc.collect()
    gc.disable()
    try:
        alone, enabled = tiny_model("deepseek_v3"), enable(tiny_model("deepseek_v3"))
        freed = [weakref.ref(alone), weakref.ref(enabled)]
        del alone, enabled
        assert (freed[0]() is None) == (freed[1]() is None)
    finally:
        gc.enable()


def test_a_configuration_shared_with_an_enabled_model_is_refused_and_harms_neither(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    first = tiny_model("deepseek_v3")
    second, inputs = type(first)(first.config).eval(), padded_prompts((9, 4))
    stock = generate(second, inputs, 6)
    enable(first)
    with pytest.raises(Unsupported) as caught:
        enable(second)
    assert caught.value.code == "shared_config"
    assert traces(second) == []
    generate(first, inputs, 6)
    disable(first)
    assert torch.equal(generate(second, inputs, 6).logprobs, stock.logprobs)
    enable(second)
    assert generate(second, inputs, 6).tokens.tolist() == stock.tokens.tolist()
    disable(second)


def test_enabling_again_repairs_what_another_choice_of_attention_undid(
    tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    model, inputs = tiny_model("deepseek_v3"), padded_prompts((9, 4))
    stock = generate(model, inputs, 6)
    enable(model)
    model.set_attn_implementation("eager")
    assert not is_enabled(model)
    enable(model)
    assert is_enabled(model)
    assert generate(model, inputs, 6).tokens.tolist() == stock.tokens.tolist()
    disable(model)
    assert model.config._attn_implementation == "eager"
    assert traces(model) == []


def test_autocast_runs_where_stock_does(family: str, tiny_model: Callable) -> None:
    model = tiny_model(family)
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(4))
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model.generate(ids, **arguments, return_dict_in_generate=True, output_logits=True)
        enable(model)
        ours = model.generate(ids, **arguments, return_dict_in_generate=True, output_logits=True)
    # both round to 8 bits in many places: the first step's logits agree to a few of those roundings
    spread = stock.logits[0].float().std()
    assert torch.isfinite(ours.logits[-1]).all()
    assert (ours.logits[0].float() - stock.logits[0].float()).abs().max() < 0.1 * spread
