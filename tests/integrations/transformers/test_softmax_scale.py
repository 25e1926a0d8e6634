"""The softmax scale and the rotary pairing, against numbers and an attention worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pagedmla
from pagedmla.integrations.transformers import PagedLatentCache, enable

# 48 = nope 32 + rope 16, and 48 ** -0.5 = 0.144337567...
# YaRN's mscale at factor 4: 0.1 * 1.0 * ln 4 + 1 = 1.138629436...
# Queries and keys both carry it, so it is squared: 1.296476992...
PLAIN = 0.14433756729740643
WITH_YARN = 0.18713033519502428
# DeepSeek-V3's own numbers: (128 + 64) ** -0.5 * (0.1 * ln 40 + 1) ** 2
DEEPSEEK_V3 = 0.13523377


@pytest.fixture
def scales_used(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every softmax_scale that ``pagedmla.decode`` is called with."""
    used: list[float] = []
    decode = pagedmla.decode

    def recording(*args: Any, **kwargs: Any) -> Any:
        used.append(kwargs["softmax_scale"])
        return decode(*args, **kwargs)

    monkeypatch.setattr(pagedmla, "decode", recording)
    return used


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek_v3", {}, PLAIN),
        ("deepseek_v3_half", {}, PLAIN),
        ("deepseek_v3_yarn", {}, WITH_YARN),
        ("deepseek_v3_yarn", {"rope_interleave": False}, WITH_YARN),
        ("deepseek_v2", {}, WITH_YARN),
        ("kimi_linear", {}, PLAIN),
    ],
)
def test_the_scale_is_the_models(
    name: str,
    changes: dict[str, Any],
    expected: float,
    scales_used: list[float],
    tiny_model: Callable,
    padded_prompts: Callable,
    generate: Callable,
) -> None:
    model = enable(tiny_model(name, **changes))
    generate(model, padded_prompts((9, 4)), 3)
    assert scales_used
    assert scales_used == pytest.approx([expected] * len(scales_used), rel=1e-9)


def test_deepseek_v3s_own_scale(
    scales_used: list[float], tiny_model: Callable, padded_prompts: Callable, generate: Callable
) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
    model = tiny_model("deepseek_v3", rope_parameters=yarn, max_position_embeddings=163840, **heads)
    generate(enable(model), padded_prompts((5,)), 3)
    assert scales_used == pytest.approx([DEEPSEEK_V3] * len(scales_used), rel=1e-6)
    assert all(scale != pytest.approx(576**-0.5) for scale in scales_used)


def rotate(x: torch.Tensor, angle: torch.Tensor, pairing: str) -> torch.Tensor:
    """x [.., tokens, 16] turned by angle [tokens, 8]; pairs are (0, 1), (2, 3) .. or, as halves, (0, 8), (1, 9) .."""
    first, second = (x[..., 0::2], x[..., 1::2]) if pairing == "neighbours" else x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()


def mul(x: torch.Tensor, linear: Any) -> torch.Tensor:
    return x @ linear.weight.double().t()


def attention_by_hand(
    layer: Any, hidden: torch.Tensor, angle: torch.Tensor, scale: float, pairing: str
) -> torch.Tensor:
    """DeepSeek-V2 paper, equations 9 to 19, in fp64 for one row: hidden [tokens, 64] -> [tokens, 64].  Nothing is absorbed."""
    q = (
        mul(rms_norm(mul(hidden, layer.q_a_proj), layer.q_a_layernorm.weight), layer.q_b_proj)
        .view(-1, 4, 48)
        .transpose(0, 1)
    )
    compressed = mul(hidden, layer.kv_a_proj_with_mqa)
    kv = (
        mul(rms_norm(compressed[:, :64], layer.kv_a_layernorm.weight), layer.kv_b_proj)
        .view(-1, 4, 56)
        .transpose(0, 1)
    )
    k_rope = rotate(compressed[:, 64:], angle, pairing)
    q_rope = rotate(q[..., 32:], angle, pairing)
    scores = scale * (q[..., :32] @ kv[..., :32].transpose(1, 2) + q_rope @ k_rope.t())
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -math.inf).softmax(-1)
    return mul((weights @ kv[..., 32:]).transpose(0, 1).flatten(1), layer.o_proj)


@pytest.mark.parametrize("pairing", ["neighbours", "halves"])
@pytest.mark.parametrize("yarn", [False, True])
def test_attention_by_hand(pairing: str, yarn: bool, tiny_model: Callable, cache_keyword: Callable) -> None:
    """The first layer's attention, prefill and decode, from its weights and the model's rotary frequencies."""
    name = "deepseek_v3_yarn" if yarn else "deepseek_v3"
    model = enable(tiny_model(name, rope_interleave=pairing == "neighbours"))
    layer, inputs, outputs = model.model.layers[0].self_attn, [], []
    layer.register_forward_hook(
        lambda _, __, kwargs, __out: inputs.append(kwargs["hidden_states"]), with_kwargs=True
    )
    layer.register_forward_hook(lambda _, __, out: outputs.append(out[0]))
    ids = torch.randint(3, 199, (1, 23), generator=torch.Generator().manual_seed(4))
    cache = PagedLatentCache(model.config, page_size=4)
    with torch.no_grad():
        for start, stop in ((0, 17), (17, 18), (18, 21), (21, 22), (22, 23)):
            model(ids[:, start:stop], **{cache_keyword(model): cache})
    hidden = torch.cat(inputs, dim=1)[0].double()
    frequencies = model.model.rotary_emb.inv_freq.double()
    if not yarn:
        # theta ** (-2 i / d)
        torch.testing.assert_close(frequencies, 10000.0 ** (-torch.arange(8).double() / 8), rtol=1e-6, atol=0)
    angle = torch.arange(23).double()[:, None] * frequencies
    scale = WITH_YARN if yarn else PLAIN
    ours = torch.cat(outputs, dim=1)[0].double()
    wanted = attention_by_hand(layer, hidden, angle, scale, pairing)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5)
    # what the test would miss, if it were blind: YaRN's factor left out, a scale from the latent's size, the other pairing
    other = "halves" if pairing == "neighbours" else "neighbours"
    for wrong_scale, wrong_pairing in ((scale * 1.296, pairing), (80**-0.5, pairing), (scale, other)):
        wrong = attention_by_hand(layer, hidden, angle, wrong_scale, wrong_pairing)
        assert (wrong - wanted).abs().max() > 100 * 2e-5


@pytest.mark.parametrize("change", [1 / 1.2964769928, 0.98])
def test_a_wrong_scale_changes_the_text(
    change: float,
    tiny_model: Callable,
    padded_prompts: Callable,
    generate: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparisons of generated text elsewhere would notice: the log-probabilities leave their tolerance."""
    model, inputs = tiny_model("deepseek_v3_yarn"), padded_prompts((37, 20, 5))
    stock = generate(model, inputs, 40)
    decode = pagedmla.decode

    def wrong(*args: Any, softmax_scale: float, **kwargs: Any) -> Any:
        return decode(*args, softmax_scale=softmax_scale * change, **kwargs)

    monkeypatch.setattr(pagedmla, "decode", wrong)
    ours = generate(enable(model), inputs, 40)
    assert (ours.logprobs - stock.logprobs).abs().max() > 100 * 1e-4
