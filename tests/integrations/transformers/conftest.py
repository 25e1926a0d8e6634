"""Tiny random models of every MLA family that is installed, and runs of them to compare.

Two layers, 4 heads, latent 64, rope 16, nope 32, value 24, in fp32 with weights large enough that attention
is far from uniform. The oracle is stock Transformers on the same weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}
COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
HYBRID = {
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "layer_types": ["linear_attention", "full_attention"],
}
# name -> (class, configuration class, what differs from COMMON)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", EXPERTS),
    "deepseek_v3_yarn": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**EXPERTS, "rope_parameters": YARN}),
    "deepseek_v3_half": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**EXPERTS, "rope_interleave": False}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**EXPERTS, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN},
    ),
    "axk1": ("AXK1ForCausalLM", "AXK1Config", EXPERTS),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", EXPERTS),
    "youtu": ("YoutuForCausalLM", "YoutuConfig", {}),
    "minicpm3": ("MiniCPM3ForCausalLM", "MiniCPM3Config", {}),
    "mistral4": (
        "Mistral4ForCausalLM",
        "Mistral4Config",
        # the query's scale steps up every 32 positions, so that the test's texts cross it
        {
            **EXPERTS,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1},
        },
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        # two attentions a layer
        {
            "num_layers": 1,
            "head_dim": 16,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {**HYBRID, "linear_head_dim": 16, "linear_num_heads": 4},
    ),
    "bailing_hybrid": ("BailingHybridForCausalLM", "BailingHybridConfig", {**HYBRID, "head_dim": 16}),
}
HYBRID_FAMILIES = ("kimi_linear", "bailing_hybrid")


def installed_families() -> list[str]:
    """Names of MODELS that the installed Transformers has."""
    return [name for name, (model_class, _, _) in MODELS.items() if hasattr(transformers, model_class)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that asks for ``family`` on every installed one, and for ``attention_only_family`` without the hybrids."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", installed_families())
    if "attention_only_family" in metafunc.fixturenames:
        families = [name for name in installed_families() if name not in HYBRID_FAMILIES]
        metafunc.parametrize("attention_only_family", families)


@dataclass(frozen=True)
class Generated:
    """``tokens`` [num_rows, prompt + new], ``logprobs`` [steps, num_rows, vocabulary] or None, and the cache it ended with."""

    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    cache: Any


@pytest.fixture(autouse=True)
def _quiet_and_small() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture
def tiny_model() -> Callable[..., transformers.PreTrainedModel]:
    """``tiny_model(name, seed=0, **changes)``: a random model of MODELS, in eval mode."""

    def make(name: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
        model_class, config_class, differences = MODELS[name]
        config = getattr(transformers, config_class)(**{**COMMON, **differences, **changes})
        torch.manual_seed(seed)
        return getattr(transformers, model_class)(config).eval()

    return make


@pytest.fixture
def tiny_config() -> Callable[..., transformers.PretrainedConfig]:
    """``tiny_config(class_name, **changes)``: the tests' sizes, with experts, in a configuration class of Transformers."""

    def make(class_name: str, **changes: Any) -> transformers.PretrainedConfig:
        return getattr(transformers, class_name)(**{**COMMON, **EXPERTS, **changes})

    return make


@pytest.fixture
def tested_families() -> set[str]:
    """Folder names of the families in MODELS."""
    return {name.removesuffix("_yarn").removesuffix("_half") for name in MODELS}


@pytest.fixture
def padded_prompts() -> Callable[..., dict[str, torch.Tensor]]:
    """``padded_prompts(lengths, side="left", seed=1)``: input_ids and attention_mask."""

    def make(lengths: tuple[int, ...], side: str = "left", seed: int = 1) -> dict[str, torch.Tensor]:
        width = max(lengths)
        ids = torch.randint(3, 199, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
        place = torch.arange(width).expand(len(lengths), -1)
        sizes = torch.tensor(lengths).unsqueeze(1)
        mask = place >= width - sizes if side == "left" else place < sizes
        return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}

    return make


@pytest.fixture
def cache_keyword() -> Callable[[torch.nn.Module], str]:
    """The keyword under which the installed release's models take a cache."""

    def name(model: torch.nn.Module) -> str:
        return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    return name


@pytest.fixture
def generate(cache_keyword: Callable[[torch.nn.Module], str]) -> Callable[..., Generated]:
    """``generate(model, inputs, new_tokens, cache=None, **options)``: greedy unless the options say otherwise."""

    def run(
        model: transformers.PreTrainedModel,
        inputs: dict[str, torch.Tensor],
        new_tokens: int,
        cache: Any = None,
        **options: Any,
    ) -> Generated:
        chosen: dict[str, Any] = {
            "do_sample": False,
            "min_new_tokens": new_tokens,
            "output_logits": True,
            **options,
        }
        if cache is not None:
            chosen[cache_keyword(model)] = cache
        result = model.generate(**inputs, max_new_tokens=new_tokens, return_dict_in_generate=True, **chosen)
        logits = getattr(result, "logits", None)
        logprobs = torch.stack(logits).log_softmax(-1) if logits is not None else None
        return Generated(result.sequences, logprobs, getattr(result, cache_keyword(model)))

    return run


@pytest.fixture
def assert_same() -> Callable[[Generated, Generated], None]:
    """Tokens identical, log-probabilities within 1e-4."""

    def check(ours: Generated, stock: Generated) -> None:
        assert ours.tokens.tolist() == stock.tokens.tolist()
        if stock.logprobs is not None and ours.logprobs is not None:
            torch.testing.assert_close(ours.logprobs, stock.logprobs, rtol=0, atol=1e-4)

    return check
