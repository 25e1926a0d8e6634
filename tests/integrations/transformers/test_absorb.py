"""The absorbed weights and the rule that chooses between absorbing and expanding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pagedmla.integrations.transformers import PagedLatentCache, enable
from pagedmla.integrations.transformers.absorb import (
    HeadSizes,
    absorb_query,
    absorbed_weights,
    absorbing_is_cheaper,
    has_weight_view,
    project_output,
)

FAMILIES_BY_HAND = [
    # r (n + v) / (2 r - n - v), rounded: the number of new tokens from which expanding is cheaper on a long context
    (HeadSizes(128, 128, 512), 171),  # DeepSeek-V3: 512 * 256 / 768 = 170.7
    (HeadSizes(192, 256, 512), 398),  # GLM-4.7-Flash: 512 * 448 / 576 = 398.2
    (HeadSizes(64, 64, 256), 85),  # MiniCPM3: 256 * 128 / 384 = 85.3
    (HeadSizes(64, 128, 256), 154),  # Mistral 4: 256 * 192 / 320 = 153.6
]


@pytest.mark.parametrize(("sizes", "turning_point"), FAMILIES_BY_HAND, ids=str)
def test_the_turning_point_of_a_long_context(sizes: HeadSizes, turning_point: int) -> None:
    assert absorbing_is_cheaper(turning_point - 1, 10**9, sizes, True)
    assert not absorbing_is_cheaper(turning_point + 1, 10**9, sizes, True)


def test_a_first_prefill_is_expanded_and_a_step_is_absorbed() -> None:
    sizes = HeadSizes(128, 128, 512)
    for length in (1, 2, 100, 4096):
        assert not absorbing_is_cheaper(length, length, sizes, True)
    for keys in (2, 3, 100, 10**6):
        assert absorbing_is_cheaper(1, keys, sizes, True)


def test_small_latents_are_always_absorbed() -> None:
    """With 2 r <= n + v attention over latents is no dearer than over keys and values, and nothing need be expanded."""
    for new in (2, 50, 5000):
        assert absorbing_is_cheaper(new, 5001, HeadSizes(96, 64, 64), True)


def test_asking_a_module_for_its_weights_is_counted() -> None:
    """It costs as much as expanding ``kv_lora_rank`` tokens: shorter contexts are expanded, as stock does."""
    sizes = HeadSizes(128, 128, 512)
    assert not absorbing_is_cheaper(1, 500, sizes, False)
    assert absorbing_is_cheaper(1, 600, sizes, False)


def test_queries_and_outputs_by_definition(tiny_model: Callable) -> None:
    module = tiny_model("deepseek_v3").double().model.layers[0].self_attn
    w_uk, w_uv = absorbed_weights(module, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 5, 48, dtype=torch.float64, generator=generator)
    latent = torch.randn(3, 1, 5, 64, dtype=torch.float64, generator=generator)
    key, value = module.expand_kv(latent, torch.zeros(3, 1, 5, 16, dtype=torch.float64))
    q_latent, q_rope = absorb_query(query, w_uk)
    assert (q_latent.stride(-1), q_rope.stride(-1)) == (1, 1)
    for row in range(3):
        for token in range(5):
            for head in range(4):
                flat = row * 5 + token
                # q_nope . (W_UK c) == (W_UK^T q_nope) . c
                by_key = query[row, head, token, :32] @ key[row, head, token, :32]
                torch.testing.assert_close(q_latent[flat, head] @ latent[row, 0, token], by_key)
                assert torch.equal(q_rope[flat, head], query[row, head, token, 32:])
    # a weighted sum that picks one token is that token's value
    picked = latent[:, 0].reshape(15, 1, 64).expand(-1, 4, -1)
    torch.testing.assert_close(project_output(picked, w_uv, 3), value.transpose(1, 2))


def test_views_of_plain_linear_weights_and_of_nothing_else() -> None:
    plain = nn.Linear(8, 6, bias=False)
    assert has_weight_view(plain)
    hooked = nn.Linear(8, 6, bias=False)
    hooked.register_forward_hook(lambda module, args, out: out * 2)
    wrapped = nn.Linear(8, 6, bias=False)
    wrapped.forward = lambda x: x  # as offloading does
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6, bias=False))
    narrow = nn.Linear(8, 6, bias=False).to(torch.float8_e4m3fn)
    for module in (
        hooked,
        wrapped,
        parametrized,
        narrow,
        WithLora(plain),
        nn.Linear(8, 6, bias=False, device="meta"),
    ):
        assert not has_weight_view(module)


class WithLora(nn.Module):
    """A projection and its low-rank correction, as adapters wrap one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(9)
        self.down = nn.Parameter(0.3 * torch.randn(4, base.in_features, generator=generator))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, 4, generator=generator))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.factor * (x @ self.down.t() @ self.up.t())


def test_wrapped_projections_are_absorbed_through_the_module(
    tiny_model: Callable,
    padded_prompts: Callable,
    generate: Callable,
    assert_same: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = tiny_model("deepseek_v3_yarn"), padded_prompts((9, 4))
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = WithLora(layer.self_attn.kv_b_proj)
    stock = generate(model, inputs, 20)
    assert_same(generate(enable(model), inputs, 20), stock)
    assert_same(generate(enable(model, absorb_below=10**6), inputs, 20), stock)


@torch.no_grad()
@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_changed_after_enabling_are_the_ones_used(
    wrapped: bool, tiny_model: Callable, padded_prompts: Callable, cache_keyword: Callable
) -> None:
    """An adapter switched, a parameter updated in place, a module replaced: nothing is remembered."""
    model, prompts = tiny_model("deepseek_v3"), padded_prompts((9, 4))
    layers: list[Any] = [layer.self_attn for layer in model.model.layers]
    if wrapped:
        for layer in layers:
            layer.kv_b_proj = WithLora(layer.kv_b_proj)
    enable(model, absorb_below=10**6)

    def logits() -> torch.Tensor:
        return model(**prompts, **{cache_keyword(model): PagedLatentCache(model.config)}).logits[:, -1]

    before = logits()
    for layer in layers:
        if wrapped:
            layer.kv_b_proj.factor = 0.0
        else:
            layer.kv_b_proj.weight.mul_(1.5)
    after = logits()
    assert (after - before).abs().max() > 1e-2
    enable(model, absorb_below=0)
    torch.testing.assert_close(after, logits(), rtol=0, atol=1e-4)
