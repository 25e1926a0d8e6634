"""The table of what is refused: each entry with its error's type, code and argument."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.models
from torch import nn

from pagedmla.contract.errors import InvalidArgument, PagedMLAError, Unsupported
from pagedmla.integrations.transformers import PagedLatentCache, disable, enable, is_enabled
from pagedmla.integrations.transformers.latent_store import LatentStore
from pagedmla.integrations.transformers.step import latent_mask
from pagedmla.integrations.transformers.versions import require_transformers

SPARSE_FAMILIES = {
    "axk2",
    "deepseek_v32",
    "dots3_note",
    "glm5_next",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl",
    "mistral_large4",
}
"""Families whose attention an indexer makes sparse."""

INDEXER = {"index_topk": 4, "index_head_dim": 32, "index_n_heads": 2}


def refused(call: Callable[[], Any]) -> tuple[type, str, str]:
    """(type, code, argument) of the error that ``call`` raises."""
    with pytest.raises(PagedMLAError) as caught:
        call()
    error = caught.value
    assert error.wanted
    assert error.got
    return type(error), error.code, error.argument


# what is done to a tiny DeepSeek-V3's first attention -> the code of the refusal
SPOILED: dict[str, Callable[[Any], None]] = {
    "sparse_attention": lambda module: setattr(module, "indexer", nn.Identity()),
    "attention_sinks": lambda module: setattr(module, "sinks", nn.Parameter(torch.zeros(4))),
    "sliding_window": lambda module: setattr(module, "sliding_window", 128),
    "causal": lambda module: setattr(module, "is_causal", False),
    "kv_b_proj_bias": lambda module: setattr(module, "kv_b_proj", nn.Linear(64, 4 * 56)),
    "expand_kv": lambda module: setattr(module, "expand_kv", lambda latent, rope: (latent, rope)),
    "remote_code": lambda module: setattr(module, "__class__", type("OwnAttention", (nn.Module,), {})),
    "output_attentions": lambda module: vars(module.config).update(
        _output_attentions=True, output_attentions=True
    ),
}


@pytest.mark.parametrize("code", SPOILED)
def test_attentions_that_cannot_be_absorbed(code: str, tiny_model: Callable) -> None:
    model = tiny_model("deepseek_v3")
    SPOILED[code](model.model.layers[1].self_attn)
    assert refused(lambda: enable(model)) == (Unsupported, code, "model")
    assert not is_enabled(model)


def test_an_expansion_in_another_order(tiny_model: Callable) -> None:
    """Heads or parts ordered otherwise than absorption assumes: found by trying, not by name."""
    model = tiny_model("deepseek_v3")
    base: Any = type(model.model.layers[0].self_attn)

    class ValuesFirst(base):
        def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            heads = self.kv_b_proj(kv_nope[:, 0]).unflatten(-1, (4, 56)).transpose(1, 2)
            return torch.cat([heads[..., 24:], k_rot.expand(-1, 4, -1, -1)], dim=-1), heads[..., :24]

    model.model.layers[1].self_attn.__class__ = ValuesFirst
    assert refused(lambda: enable(model)) == (Unsupported, "expand_kv", "model")


@pytest.mark.parametrize("value", [None, 3, "deepseek", {}])
def test_what_is_not_a_model(value: object) -> None:
    assert refused(lambda: enable(value)) == (InvalidArgument, "model", "model")
    assert refused(lambda: disable(value)) == (InvalidArgument, "model", "model")


def test_models_without_latent_attention() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=199, **sizes)
    model = transformers.LlamaForCausalLM(config)
    assert refused(lambda: enable(model)) == (InvalidArgument, "model", "model")
    assert refused(lambda: PagedLatentCache(config)) == (InvalidArgument, "config", "config")
    assert disable(model) is model


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"backend": "no_such"}, "backend"),
        ({"absorb_below": -1}, "absorb_below"),
        ({"absorb_below": 1.5}, "absorb_below"),
        ({"absorb_below": True}, "absorb_below"),
    ],
)
def test_settings_of_enable(settings: dict[str, Any], argument: str, tiny_model: Callable) -> None:
    model = tiny_model("deepseek_v3")
    assert refused(lambda: enable(model, **settings)) == (InvalidArgument, argument, argument)
    assert not is_enabled(model)


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, None])
def test_page_sizes(value: object, tiny_model: Callable) -> None:
    config = tiny_model("deepseek_v3").config
    assert refused(lambda: PagedLatentCache(config, page_size=value)) == (
        InvalidArgument,
        "page_size",
        "page_size",
    )


@pytest.mark.parametrize("value", [-1, 2.0, "8", False])
def test_numbers_of_pages(value: object, tiny_model: Callable) -> None:
    config = tiny_model("deepseek_v3").config
    assert refused(lambda: PagedLatentCache(config, num_pages=value)) == (
        InvalidArgument,
        "num_pages",
        "num_pages",
    )


@pytest.mark.parametrize("value", [None, {}, 64, "config"])
def test_what_is_not_a_configuration(value: object) -> None:
    assert refused(lambda: PagedLatentCache(value)) == (InvalidArgument, "config", "config")


def test_a_cache_for_layers_with_a_window(tiny_model: Callable) -> None:
    config = tiny_model("deepseek_v3").config
    config.layer_types = ["full_attention", "sliding_attention"]
    config.sliding_window = 16
    assert refused(lambda: PagedLatentCache(config)) == (Unsupported, "layer_type", "config")


@torch.no_grad()
def test_attention_weights(tiny_model: Callable, padded_prompts: Callable) -> None:
    """Stock SDPA returns None for them and a warning; here it is said."""
    model = enable(tiny_model("deepseek_v3"))
    ids = torch.tensor([[5, 6, 7]])
    wanted = (Unsupported, "output_attentions", "output_attentions")
    assert refused(lambda: model(ids, output_attentions=True)) == wanted
    everything = {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 2}
    assert refused(lambda: model.generate(ids, **everything)) == wanted


def test_training(tiny_model: Callable) -> None:
    model = enable(tiny_model("deepseek_v3", attention_dropout=0.1)).train()
    ids = torch.tensor([[5, 6, 7]])
    assert refused(lambda: model(ids))[1:] == ("dropout", "dropout")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    assert refused(lambda: model(ids)) == (Unsupported, "training", "model")
    with torch.no_grad():
        model(ids)
    disable(model)(ids).logits.sum().backward()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 4),
        ("softcap", 30.0),
        ("s_aux", torch.zeros(4)),
        ("indices", torch.zeros(1)),
        ("position_bias", torch.zeros(1)),
        ("is_causal", False),
    ],
)
@torch.no_grad()
def test_keywords_that_change_what_attention_means(name: str, value: Any, tiny_model: Callable) -> None:
    model = enable(tiny_model("deepseek_v3"))
    assert refused(lambda: model(torch.tensor([[5, 6, 7]]), **{name: value}))[2] == name


@torch.no_grad()
def test_a_layer_attended_to_twice_in_a_forward(tiny_model: Callable, cache_keyword: Callable) -> None:
    """Its tokens would be stored twice."""
    model = enable(tiny_model("deepseek_v3"))
    model.model.layers[1].self_attn.layer_idx = 0
    cache = PagedLatentCache(model.config)
    found = refused(lambda: model(torch.tensor([[5, 6, 7]]), **{cache_keyword(model): cache}))
    assert found == (Unsupported, "layer_repeated", "cache")


def test_queries_that_do_not_follow_the_cached_tokens() -> None:
    """A mask made for another cache than the one that is written."""
    step = latent_mask(batch_size=1, q_length=1, kv_length=4, q_offset=3)
    assert refused(lambda: step.paged(LatentStore(page_size=4))) == (Unsupported, "query_offset", "cache")


@torch.no_grad()
def test_another_batch_than_the_caches(tiny_model: Callable, cache_keyword: Callable) -> None:
    model = enable(tiny_model("deepseek_v3"))
    cache = PagedLatentCache(model.config)
    model(torch.tensor([[5, 6, 7]]), **{cache_keyword(model): cache})
    found = refused(lambda: model(torch.tensor([[5], [6]]), **{cache_keyword(model): cache}))
    assert found == (InvalidArgument, "batch_size", "input_ids")


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.14.1", "5.2", "unknown"])
def test_older_releases(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(lambda: require_transformers(version)) == (
        Unsupported,
        "transformers_version",
        "transformers",
    )
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(Unsupported, match=r"transformers >= 5\.15"):
        require_transformers()


@pytest.mark.parametrize("version", ["5.15.0", "5.17.0", "5.24.0.dev0", "6.0"])
def test_newer_releases(version: str) -> None:
    require_transformers(version)
    require_transformers()


def test_no_transformers_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused(require_transformers) == (Unsupported, "transformers_missing", "transformers")


def families_with_a_latent() -> list[str]:
    """Folders of the installed Transformers whose modeling file expands latents."""
    root = Path(transformers.models.__path__[0])
    names = [module.name for module in pkgutil.iter_modules([str(root)]) if module.ispkg]
    files = {name: root / name / f"modeling_{name}.py" for name in names}
    return [name for name, file in files.items() if file.exists() and "def expand_kv" in file.read_text()]


def test_every_family_is_either_tested_or_refused(tested_families: set[str]) -> None:
    """A release that brings a new family fails here until somebody looks at it."""
    installed = set(families_with_a_latent())
    assert installed
    assert installed <= tested_families | SPARSE_FAMILIES


SPARSE_MODELS = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {}),
    "axk2": ("AXK2ForCausalLM", "AXK2Config", {}),
    "hy_v4": ("HYV4ForCausalLM", "HYV4Config", {}),
}


@pytest.mark.parametrize("name", SPARSE_MODELS)
def test_sparse_families_are_refused(name: str, tiny_config: Callable) -> None:
    model_class, config_class, differences = SPARSE_MODELS[name]
    config = tiny_config(config_class, **INDEXER, **differences)
    model = getattr(transformers, model_class)(config)
    assert refused(lambda: enable(model)) == (Unsupported, "sparse_attention", "model")
    assert refused(lambda: PagedLatentCache(config)) == (Unsupported, "layer_type", "config")
