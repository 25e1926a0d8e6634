"""Single forwards of an enabled model: padding on either side, masks of the caller's, lower precision, gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.masking_utils import create_causal_mask

from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.integrations.transformers import PagedLatentCache, disable, enable


@torch.no_grad()
def chunks(
    model: Any, keyword: str, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None, ends: list[int]
) -> torch.Tensor:
    """Logits [num_rows, tokens, vocabulary] of ``ids`` shown in chunks that end at ``ends``."""
    logits, start = [], 0
    for end in ends:
        shown = None if mask is None else mask[:, :end]
        positions = None if mask is None else (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:end]
        inputs = {"input_ids": ids[:, start:end], "attention_mask": shown, "position_ids": positions}
        logits.append(model(**inputs, use_cache=True, **{keyword: cache}).logits)
        start = end
    return torch.cat(logits, dim=1)


def stock_cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("ends", [[23], [9, 23], [1, 2, 3, 20, 23]], ids=str)
@pytest.mark.parametrize("absorb_below", [None, 0, 10**9])
def test_logits_at_every_position_that_sees_a_token(
    side: str,
    ends: list[int],
    absorb_below: int | None,
    tiny_model: Callable,
    padded_prompts: Callable,
    cache_keyword: Callable,
) -> None:
    """Right pads see the real tokens before them, in stock and here; left pads see nothing, and are no one's business."""
    model = tiny_model("deepseek_v3_yarn")
    prompts = padded_prompts((23, 16, 1, 22), side=side)
    ids, mask, keyword = prompts["input_ids"], prompts["attention_mask"], cache_keyword(model)
    stock = chunks(model, keyword, stock_cache(model), ids, mask, ends)
    enable(model, absorb_below=absorb_below)
    sees_something = mask.cumsum(1) > 0
    for page_size in (1, 4, 64):
        cache = PagedLatentCache(model.config, page_size=page_size)
        ours = chunks(model, keyword, cache, ids, mask, ends)
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours[sees_something], stock[sees_something], rtol=0, atol=1e-4)
        assert cache.store.table.lengths == [23, 16, 1, 22]
    ours = chunks(model, keyword, stock_cache(model), ids, mask, ends)
    torch.testing.assert_close(ours[sees_something], stock[sees_something], rtol=0, atol=1e-4)


def test_holes_in_the_mask(tiny_model: Callable, cache_keyword: Callable) -> None:
    """Padding in the middle of a text, in the first chunk and in a later one."""
    model = tiny_model("deepseek_v2")
    keyword, generator = cache_keyword(model), torch.Generator().manual_seed(3)
    ids = torch.randint(3, 199, (3, 17), generator=generator)
    mask = (torch.rand(3, 17, generator=generator) > 0.4).long()
    mask[:, 0] = 1
    for ends in ([17], [6, 17], [6, 7, 8, 17]):
        stock = chunks(model, keyword, stock_cache(model), ids, mask, ends)
        ours = chunks(enable(model), keyword, PagedLatentCache(model.config, page_size=3), ids, mask, ends)
        disable(model)
        torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4)


def test_without_a_mask_and_without_a_cache(tiny_model: Callable, cache_keyword: Callable) -> None:
    model = tiny_model("deepseek_v3_yarn")
    ids = torch.randint(3, 199, (2, 19), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stock = model(ids, use_cache=False).logits
        enable(model)
        torch.testing.assert_close(model(ids, use_cache=False).logits, stock, rtol=0, atol=1e-5)
        enable(model, absorb_below=100)
        torch.testing.assert_close(model(ids, use_cache=False).logits, stock, rtol=0, atol=1e-4)
    ours = chunks(model, cache_keyword(model), PagedLatentCache(model.config, 4), ids, None, [7, 8, 19])
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4)


@pytest.mark.parametrize("absorb_below", [None, 100])
def test_packed_sequences(absorb_below: int | None, tiny_model: Callable) -> None:
    """Positions that begin anew say that several texts share a row: attention must not cross them."""
    model = tiny_model("deepseek_v3")
    ids = torch.randint(3, 199, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    with torch.no_grad():
        stock = model(ids, position_ids=positions, use_cache=False).logits
        ours = enable(model, absorb_below=absorb_below)(ids, position_ids=positions, use_cache=False).logits
        alone = model(ids[:, 5:8], use_cache=False).logits
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours[:, 5:8], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("absorb_below", [0, 100])
@pytest.mark.parametrize("paged", [False, True])
def test_a_4d_mask_of_the_caller(
    paged: bool, absorb_below: int, kind: str, tiny_model: Callable, cache_keyword: Callable
) -> None:
    model = tiny_model("deepseek_v3_yarn")
    keyword, generator = cache_keyword(model), torch.Generator().manual_seed(0)
    ids = torch.randint(3, 199, (2, 14), generator=generator)
    allowed = (torch.rand(2, 1, 14, 14, generator=generator) > 0.5).tril() | torch.eye(14, dtype=torch.bool)
    mask = (
        allowed
        if kind == "bool"
        else torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    )

    @torch.no_grad()
    def run(cache: Any) -> torch.Tensor:
        first = model(ids[:, :9], attention_mask=mask[:, :, :9, :9], **{keyword: cache}).logits
        second = model(ids[:, 9:], attention_mask=mask[:, :, 9:], **{keyword: cache}).logits
        return torch.cat([first, second], dim=1)

    stock = run(stock_cache(model))
    enable(model, absorb_below=absorb_below)
    ours = run(PagedLatentCache(model.config, page_size=4) if paged else stock_cache(model))
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4)


def test_a_4d_mask_after_padding_was_left_out(
    tiny_model: Callable, padded_prompts: Callable, cache_keyword: Callable
) -> None:
    """Its columns count padding, the pages do not: they are matched up."""
    model = tiny_model("deepseek_v3_yarn")
    keyword, prompts = cache_keyword(model), padded_prompts((8, 3, 5))
    more = torch.randint(3, 199, (3, 2), generator=torch.Generator().manual_seed(5))
    real = torch.cat([prompts["attention_mask"], torch.ones(3, 2, dtype=torch.long)], dim=1).bool()
    mask = real[:, None, None, :] & torch.ones(2, 10, dtype=torch.bool).tril(8)
    # one more token hidden, which only the 4D mask knows of
    mask[:, :, :, 6] = False

    @torch.no_grad()
    def run(cache: Any) -> torch.Tensor:
        model(**prompts, **{keyword: cache})
        return model(more, attention_mask=mask, **{keyword: cache}).logits

    stock = run(stock_cache(model))
    for absorb_below in (0, 100):
        enable(model, absorb_below=absorb_below)
        ours = run(PagedLatentCache(model.config, page_size=2))
        torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4)


@pytest.mark.parametrize("absorb_below", [0, 100])
@torch.no_grad()
def test_a_mask_function_of_the_models(
    absorb_below: int,
    tiny_model: Callable,
    padded_prompts: Callable,
    cache_keyword: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models may narrow causality (every third token hidden, say): it is not plain, and the lengths cannot express it."""
    model = tiny_model("deepseek_v3_yarn")
    modeling = sys.modules[type(model).__module__]
    narrowed = functools.partial(
        create_causal_mask, and_mask_function=lambda row, head, q, k: (q - k) % 3 != 1
    )
    monkeypatch.setattr(modeling, "create_causal_mask", narrowed)
    prompts = padded_prompts((17, 9, 4))
    ids, mask, keyword = prompts["input_ids"], prompts["attention_mask"], cache_keyword(model)
    stock = chunks(model, keyword, stock_cache(model), ids, mask, [11, 12, 17])
    enable(model, absorb_below=absorb_below)
    sees_something = mask.bool()
    for cache in (PagedLatentCache(model.config, page_size=4), stock_cache(model)):
        ours = chunks(model, keyword, cache, ids, mask, [11, 12, 17])
        torch.testing.assert_close(ours[sees_something], stock[sees_something], rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 1, 1, 6), (2, 1, 2, 7), (2, 1, 3, 9)], ids=str)
@torch.no_grad()
def test_a_4d_mask_of_another_shape_is_refused(
    shape: tuple[int, ...], tiny_model: Callable, padded_prompts: Callable, cache_keyword: Callable
) -> None:
    model = enable(tiny_model("deepseek_v3"))
    keyword, cache = cache_keyword(model), PagedLatentCache(model.config)
    model(**padded_prompts((6, 4)), **{keyword: cache})
    tokens = torch.full((2, shape[2] if shape[3] != 9 else 1), 5)
    with pytest.raises(InvalidArgument) as refused:
        model(tokens, attention_mask=torch.ones(shape, dtype=torch.bool), **{keyword: cache})
    assert refused.value.argument == "attention_mask"
    assert cache.get_seq_length() == 6


def test_a_mask_that_changes_its_mind_is_refused(
    tiny_model: Callable, padded_prompts: Callable, cache_keyword: Callable
) -> None:
    model = enable(tiny_model("deepseek_v3"))
    keyword, prompts = cache_keyword(model), padded_prompts((6, 4))
    cache = PagedLatentCache(model.config)
    token = torch.tensor([[5], [6]])
    with torch.no_grad():
        model(**prompts, **{keyword: cache})
        with pytest.raises(Unsupported) as changed:
            model(token, attention_mask=torch.ones(2, 7), **{keyword: cache})
        with pytest.raises(InvalidArgument) as narrow:
            model(token, attention_mask=torch.ones(2, 1), **{keyword: cache})
    assert (changed.value.code, narrow.value.code) == ("attention_mask_changed", "attention_mask")
    # nothing was shown to the cache by either
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("family_in_bf16", ["deepseek_v3_yarn", "glm4_moe_lite", "minicpm3"])
def test_bf16_errs_no_more_than_stock_does(
    family_in_bf16: str, tiny_model: Callable, cache_keyword: Callable
) -> None:
    """Both against fp32 on the same (rounded) weights; a decode of 40 tokens, the tokens given."""
    model = tiny_model(family_in_bf16, seed=1).bfloat16()
    exact = tiny_model(family_in_bf16, seed=1)
    exact.load_state_dict(model.state_dict())
    keyword = cache_keyword(model)
    ids = torch.randint(3, 199, (8, 48), generator=torch.Generator().manual_seed(2))
    ends = [8, *range(9, 49)]
    wanted = chunks(exact, keyword, stock_cache(exact), ids, None, ends)
    stock = chunks(model, keyword, stock_cache(model), ids, None, ends)
    paged = chunks(enable(model), keyword, PagedLatentCache(model.config, 16), ids, None, ends)
    absorbed = chunks(model, keyword, stock_cache(model), ids, None, ends)
    assert paged.dtype == torch.bfloat16
    allowed = 1.5 * (stock - wanted).float().pow(2).mean().sqrt()
    for ours in (paged, absorbed):
        assert (ours - wanted).float().pow(2).mean().sqrt() <= allowed


def test_fp16_pages(tiny_model: Callable, cache_keyword: Callable) -> None:
    model = enable(tiny_model("deepseek_v3").half())
    cache = PagedLatentCache(model.config, page_size=8)
    ids = torch.randint(3, 199, (2, 12), generator=torch.Generator().manual_seed(2))
    logits = chunks(model, cache_keyword(model), cache, ids, None, [10, 11, 12])
    assert torch.isfinite(logits).all()
    assert {pool.dtype for pool in cache.store.pools.values()} == {torch.float16}


def test_gradients_flow_without_a_paged_cache_and_are_refused_with_one(
    tiny_model: Callable, cache_keyword: Callable
) -> None:
    model = tiny_model("deepseek_v2")
    ids = torch.randint(3, 199, (2, 9), generator=torch.Generator().manual_seed(0))
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    model(ids, use_cache=False).logits.square().sum().backward()
    stock, weight.grad = weight.grad, None
    enable(model, absorb_below=100)
    model(ids, use_cache=False).logits.square().sum().backward()
    torch.testing.assert_close(weight.grad, stock, rtol=1e-3, atol=1e-3 * float(stock.abs().max()))
    with pytest.raises(Unsupported) as refused:
        model(ids, **{cache_keyword(model): PagedLatentCache(model.config)})
    assert refused.value.code == "gradients"


def test_a_cache_made_in_inference_mode_outlives_it(tiny_model: Callable, cache_keyword: Callable) -> None:
    model = tiny_model("deepseek_v3")
    ids = torch.randint(3, 199, (2, 30), generator=torch.Generator().manual_seed(0))
    keyword = cache_keyword(model)
    stock = chunks(model, keyword, stock_cache(model), ids, None, [30])
    enable(model)
    cache = PagedLatentCache(model.config, page_size=4)
    with torch.inference_mode():
        first = model(ids[:, :11], **{keyword: cache}).logits
    with torch.no_grad():
        second = model(ids[:, 11:12], **{keyword: cache}).logits
    with torch.inference_mode():
        third = model(ids[:, 12:], **{keyword: cache}).logits
    torch.testing.assert_close(torch.cat([first, second, third], 1), stock, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_step_on_a_static_cache_compiles_to_one_graph(
    tiny_model: Callable, cache_keyword: Callable
) -> None:
    from transformers import StaticCache

    model = tiny_model("youtu")
    keyword, ids = (
        cache_keyword(model),
        torch.randint(3, 199, (2, 9), generator=torch.Generator().manual_seed(0)),
    )

    def run(forward: Callable) -> torch.Tensor:
        cache, logits = StaticCache(config=model.config, max_cache_len=16), []
        model(ids, **{keyword: cache})
        for length in range(9, 12):
            mask = (torch.arange(16) <= length).expand(2, 1, 1, -1)
            positions = torch.full((2, 1), length)
            inputs = {"attention_mask": mask, "position_ids": positions, "use_cache": True, keyword: cache}
            logits.append(forward(input_ids=torch.tensor([[5], [6]]), **inputs).logits)
        return torch.cat(logits, dim=1)

    stock = run(model.forward)
    enable(model)
    compiled = run(torch.compile(model.forward, backend="eager", fullgraph=True))
    torch.testing.assert_close(compiled, stock, rtol=0, atol=1e-4)
