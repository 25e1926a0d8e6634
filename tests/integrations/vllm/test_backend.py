"""The adapter over the stand-in: a builder and a layer, driven as vLLM's runner drives them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from batches import arguments, check, make_batch
from integrations.vllm.runner import NULL_BLOCK, Runner, layer_queries
from integrations.vllm.stand_in import AttentionCGSupport, AttentionType, QueryLenSupport, config_of, layer_of
from torch import Tensor

from pagedmla.contract.errors import Unsupported

RANK, ROPE = 512, 64


def _spec(page_size: int, dtype: torch.dtype) -> SimpleNamespace:
    """MLAAttentionSpec with the kernel's block size (v1/worker/utils.py:241)."""
    return SimpleNamespace(block_size=page_size, dtype=dtype, head_size=RANK + ROPE)


def _builder(
    backend: ModuleType, num_heads: int = 2, page_size: int = 16, rank: int = RANK, **options: Any
) -> Any:
    config = config_of({"layer.0": layer_of(num_heads, rank, 0.13)}, **options)
    dtype = config.model_config.dtype
    cls = backend.PagedMLABackend.get_builder_cls()
    return cls(_spec(page_size, dtype), ["layer.0"], config, torch.device("cpu"))


def _impl(backend: ModuleType, num_heads: int = 2, rank: int = RANK, **changes: Any) -> Any:
    """A layer's implementation, made by names as there (mla_attention.py:432)."""
    given: dict[str, Any] = {
        "num_heads": num_heads,
        "head_size": rank + ROPE,
        "scale": 0.13,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
        "indexer": None,
    }
    return backend.PagedMLABackend.get_impl_cls()(**given | changes)


def _run(
    backend: ModuleType,
    builder: Any,
    impl: Any,
    seq_lens: Sequence[int],
    q_lens: Sequence[int],
    num_reqs: int,
    num_tokens: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """One step and one layer, held against the oracle; returns the rows of padding."""
    page_size, dtype = builder.kv_cache_spec.block_size, builder.vllm_config.model_config.dtype
    heads = builder.buffers.problem.num_heads
    batch = make_batch(
        seq_lens, q_lens, num_heads=heads, dims=(impl.kv_lora_rank, ROPE), q_dtype=dtype, **options
    )
    call = arguments(batch, page_size)
    runner = Runner(num_reqs, 256 // page_size + 20)
    runner.write(call, q_lens, num_reqs)
    metadata = builder.build(0, runner.step(num_reqs, num_tokens, max(q_lens)))
    queries = layer_queries(call["q"], num_tokens, impl.kv_lora_rank)
    out, lse = impl.forward_mqa(queries, call["kv_cache"], metadata, SimpleNamespace())
    tokens = sum(q_lens)
    check((out[:tokens], lse[:tokens]), call)
    # what _v_up_proj does with it (mla_attention.py:963) needs no copy
    assert out.view(-1, heads, impl.kv_lora_rank).dtype == dtype
    return out[tokens:], lse[tokens:]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rank", [512, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_decode_step(backend: ModuleType, dtype: torch.dtype, rank: int, page_size: int) -> None:
    builder = _builder(backend, page_size=page_size, rank=rank, dtype=dtype)
    padding = _run(backend, builder, _impl(backend, rank=rank), (65, 1, 131), (1, 1, 1), 8, 8)
    assert bool((padding[0] == 0).all())
    assert bool((padding[1] == -torch.inf).all())


@pytest.mark.parametrize("q_lens", [(4, 4, 4), (1, 4, 2)], ids=["uniform", "ragged"])
def test_drafts_are_decoded(backend: ModuleType, q_lens: tuple[int, ...]) -> None:
    builder = _builder(backend, num_speculative_tokens=3)
    assert builder.reorder_batch_threshold == 4
    _run(backend, builder, _impl(backend), (65, 4, 131), q_lens, 3, sum(q_lens))


def test_a_kernel_page_smaller_than_the_managers_block(backend: ModuleType) -> None:
    builder = _builder(backend, page_size=16, block_size=128)
    assert builder.buffers.problem.page_size == 16
    _run(backend, builder, _impl(backend), (65, 131), (1, 1), 2, 2)


def test_what_the_builder_declares(backend: ModuleType) -> None:
    cls = backend.PagedMLABackend.get_builder_cls()
    config = config_of({})
    assert cls.query_len_support == QueryLenSupport.VARLEN
    assert cls.get_cudagraph_support(config, None) == AttentionCGSupport.UNIFORM_BATCH
    drafting = config_of({}, num_speculative_tokens=3)
    assert cls.get_cudagraph_support(drafting, None) == AttentionCGSupport.UNIFORM_BATCH


def test_ranks_that_share_out_the_tokens(backend: ModuleType) -> None:
    """Decode context parallelism: local lengths and pages, the queries of all ranks' heads, and lse to merge by."""
    builder = _builder(backend, num_heads=2, num_shards=2, num_speculative_tokens=3)
    # from two query tokens on, a rank's own lengths do not say what a query sees
    assert builder.reorder_batch_threshold == 1
    assert (
        type(builder).get_cudagraph_support(builder.vllm_config, None)
        == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    impl = _impl(backend, num_heads=2)
    assert impl.can_return_lse_for_decode
    # this rank holds 33 of 65 tokens, and none of another sequence's
    batch = make_batch((33, 0), num_heads=4, dims=(RANK, ROPE), q_dtype=torch.float16)
    call = arguments(batch, 16)
    runner = Runner(2, 30)
    runner.write(call, (1, 1), 2)
    common = runner.step(2, 2, 1)
    common.dcp_local_seq_lens, common.seq_lens = common.seq_lens, torch.tensor([65, 1], dtype=torch.int32)
    metadata = builder.build(0, common)
    assert metadata.decode.dcp_tot_seq_lens.tolist() == [65, 1]
    # mla_attention.py:758: the ranks' queries joined, one tensor
    out, lse = impl.forward_mqa(call["q"], call["kv_cache"], metadata, SimpleNamespace())
    check((out, lse), call)
    assert (lse.dtype, lse.shape) == (torch.float32, (2, 4))
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == -torch.inf).all())


def test_batch_invariance_is_passed_on(backend: ModuleType, modules: dict[str, ModuleType]) -> None:
    assert backend.PagedMLABackend.supports_batch_invariance()
    assert not _builder(backend).buffers.problem.batch_invariant
    modules["vllm.envs"].VLLM_BATCH_INVARIANT = True  # type: ignore[attr-defined]
    builder = _builder(backend)
    assert builder.buffers.problem.batch_invariant
    _run(backend, builder, _impl(backend), (65, 131), (1, 1), 2, 2)
    metadata = builder.build(0, Runner(2, 4).step(2, 2, 1))
    assert metadata.decode.step.batch_invariant


def test_a_builder_has_buffers_of_its_own(backend: ModuleType) -> None:
    """Micro-batches run on two streams, each with a builder."""
    one, two = _builder(backend).buffers, _builder(backend).buffers
    for name in ("out", "lse", "workspace"):
        assert getattr(one, name).data_ptr() != getattr(two, name).data_ptr()


def test_layers_with_other_heads_are_refused(backend: ModuleType) -> None:
    config = config_of({"a": layer_of(2, RANK, 0.1), "b": layer_of(4, RANK, 0.1)})
    cls = backend.PagedMLABackend.get_builder_cls()
    with pytest.raises(Unsupported, match=r"num_heads: wanted the same number .* got 2 and 4"):
        cls(_spec(16, torch.float16), ["a", "b"], config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        ("sliding_window", 128),
        ("alibi_slopes", [0.5]),
        ("logits_soft_cap", 30.0),
        ("attn_type", AttentionType.ENCODER),
    ],
)
def test_a_layer_that_wants_more_is_refused(backend: ModuleType, feature: str, value: object) -> None:
    with pytest.raises(Unsupported, match=feature):
        _impl(backend, **{feature: value})


def test_queries_stay_in_the_models_dtype(backend: ModuleType) -> None:
    # else vLLM would join and quantise them (mla_attention.py:750)
    assert not _impl(backend).supports_quant_query_input


@pytest.mark.parametrize("length", [127, 131])
def test_one_token_pages_through_a_whole_generation(backend: ModuleType, length: int) -> None:
    """The founding fault (vLLM #31282): on one-token pages a kernel was told that the whole sequence lies in its last page.

    There is no such number here: the lengths are vLLM's own tensor.  Every step from 1 to ``length`` tokens is held against
    plain arithmetic, beside a neighbour that stands still and a row of padding.  Cells past a row's end are stale, pages that
    nobody owns are NaN.
    """
    heads, neighbour = 2, 64
    builder = _builder(backend, num_heads=heads, page_size=1, block_size=1)
    impl = _impl(backend, num_heads=heads)
    generator = torch.Generator().manual_seed(length)
    num_pages = 2 * length + neighbour
    pages = torch.randperm(num_pages, generator=generator).to(torch.int32)
    cache = torch.full((num_pages, 1, RANK + ROPE), torch.nan, dtype=torch.float16)
    tokens = torch.randn(length + neighbour, RANK + ROPE, generator=generator).to(torch.float16)
    runner = Runner(3, 300)
    own, others = pages[:length], pages[length : length + neighbour]
    cache[others, 0] = tokens[length:]
    runner.block_table[1, :neighbour] = others
    runner.block_table[2] = NULL_BLOCK
    starts = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    runner.query_starts.copy_(starts)
    runner.query_starts_on_host.copy_(starts)
    for now in range(1, length + 1):
        cache[own[now - 1], 0] = tokens[now - 1]
        runner.block_table[0, now - 1] = own[now - 1]
        runner.seq_lens.copy_(torch.tensor([now, neighbour, 0]))
        q = torch.randn(2, heads, RANK + ROPE, generator=generator).to(torch.float16)
        metadata = builder.build(0, runner.step(3, 3, 1))
        out, lse = impl.forward_mqa(layer_queries(q, 3, RANK), cache, metadata, SimpleNamespace())
        for row, keys in enumerate((tokens[:now], tokens[length:])):
            scores = 0.13 * (q[row].double() @ keys.double().T)
            expected = torch.softmax(scores, -1) @ keys[:, :RANK].double()
            torch.testing.assert_close(lse[row].double(), torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-5)
            # float16 keeps 11 bits of values up to about 4
            torch.testing.assert_close(out[row].double(), expected, rtol=2e-3, atol=2e-3)
        assert bool((out[2] == 0).all())
        assert bool((lse[2] == -torch.inf).all())
