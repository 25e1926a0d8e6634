"""MODEL: absorbed decode is the model's own multi-head attention; the scale is given, and a rope layout is only an order."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from batches import arguments, check, make_batch, run
from torch import Tensor

import pagedmla
from pagedmla import reference
from pagedmla.contract.errors import InvalidArgument


def _weights(heads: int, nope: int, rank: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    w_uk = torch.randn(heads, nope, rank, generator=generator) / rank**0.5
    w_uv = torch.randn(heads, v_head_dim, rank, generator=generator) / rank**0.5
    return w_uk, w_uv


@pytest.mark.parametrize("softmax_scale", [0.02, 192**-0.5, 0.1147213867929261])
@pytest.mark.parametrize("causal", [True, False])
def test_absorb_decode_project_is_multi_head_attention(softmax_scale: float, causal: bool) -> None:
    """The third scale is DeepSeek-V2's with YaRN: mscale_all_dim 0.707, factor 40."""
    heads, nope, rope, rank, v_head_dim = 4, 24, 8, 64, 20
    seq_lens, q_lens = [2, 131, 0, 16, 17], [1, 3, 1, 2, 1]
    call = arguments(make_batch(seq_lens, q_lens, dims=(rank, rope), q_dtype=torch.float32), 16)
    w_uk, w_uv = _weights(heads, nope, rank, v_head_dim)
    generator = torch.Generator().manual_seed(5)
    q_nope = torch.randn(sum(q_lens), heads, nope, generator=generator) * 3
    q_pe = torch.randn(sum(q_lens), heads, rope, generator=generator) * 3
    absorbed = reference.absorb_query(q_nope, w_uk).float()
    how: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal}
    out, _ = run(call, q=(absorbed, q_pe), **how)
    got = torch.einsum("thr,hvr->thv", out, w_uv)
    wanted = reference.multi_head(
        q_nope,
        q_pe,
        call["kv_cache"],
        call["block_table"],
        call["seq_lens"],
        w_uk,
        w_uv,
        cu_seqlens_q=torch.tensor(list(accumulate(q_lens, initial=0)), dtype=torch.int32),
        **how,
    )
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("pairing", ["interleaved", "halves"])
def test_scores_do_not_depend_on_the_rope_order_that_q_and_k_share(pairing: str) -> None:
    rope = 8
    call = arguments(make_batch([131, 17, 2], num_heads=4, dims=(32, rope), q_dtype=torch.float32))
    order = torch.arange(rope)
    order = torch.cat([order[0::2], order[1::2]]) if pairing == "halves" else torch.randperm(rope)
    places = torch.cat([torch.arange(32), 32 + order])
    moved = call | {
        "q": call["q"][..., places].contiguous(),
        "kv_cache": call["kv_cache"][..., places].contiguous(),
    }
    out, _ = run(call)
    other, other_lse = run(moved)
    check((other, other_lse), call)
    torch.testing.assert_close(out, other, rtol=0, atol=1e-5)
    # permuted in q alone it is another model
    mixed, _ = run(call | {"q": moved["q"]})
    assert not torch.allclose(mixed, out, atol=1e-2) or pairing != "halves"


@pytest.mark.parametrize("softmax_scale", [1e-30, 0.01, 0.13, 1.0, 3.0])
def test_the_scale_is_used_as_given(softmax_scale: float) -> None:
    call = arguments(make_batch([2, 40, 127], num_heads=4, q_dtype=torch.float32)) | {
        "softmax_scale": softmax_scale
    }
    check(run(call), call)
    check(run(call, batch_invariant=True), call)


def test_the_scale_has_no_default() -> None:
    call = arguments(make_batch([4]))
    with pytest.raises(TypeError, match="softmax_scale"):
        pagedmla.decode(call["q"], call["kv_cache"], call["block_table"], call["seq_lens"])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "softmax_scale",
    [0.0, -0.1, float("nan"), float("inf"), 1e-50, 1e300, None, "0.1", True, torch.tensor(0.1)],
)
def test_scales_that_are_none_are_refused(softmax_scale: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(arguments(make_batch([4])), softmax_scale=softmax_scale)
    assert caught.value.argument == "softmax_scale"
