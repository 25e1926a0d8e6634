"""Peers of the benchmark: adapters of the conformance kit over our batches, called without their lse.

How each is found, loaded and called is tested with the adapters; here, that the benchmark hands them the right batch, that
their plans are made before the time runs, and what is said when they are not there.  The stand-ins compute with the reference
from exactly what they are handed.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.bench.batch import SOFTMAX_SCALE, DecodeBatch, expected_sequences
from pagedmla.bench.contenders import load_peers
from pagedmla.bench.peers import PEER_NAMES, make_peer
from pagedmla.bench.peers.peer import AdapterPeer, call_of
from pagedmla.bench.peers.planning import flash_mla_that_plans, time_plan
from pagedmla.bench.verify import check_result
from pagedmla.conformance.adapters import limits
from pagedmla.conformance.adapters.adapter import PreparedCall
from pagedmla.conformance.adapters.flashinfer import _plan_arguments
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.contract.errors import InvalidArgument
from pagedmla.contract.target import Target

from .conftest import small_batch

HOPPER = Target("nvidia", "sm_90", 132, 232448)

LONE_FILE = """
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
is_hip = current_platform.is_rocm()
def decode_attention_fwd(
    q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale, page_size=1,
    logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False,
):
    import pagedmla
    assert attn_logits.shape == (*o.shape[:2], num_kv_splits, o.shape[2] + 1)
    assert k_buffer.shape[1:] == (page_size, 1, 576) and v_buffer.shape[3] == 512 and v_buffer.data_ptr() == k_buffer.data_ptr()
    assert is_mla and k_scale.item() == v_scale.item() == 1.0
    out, _ = pagedmla.reference.decode(q, k_buffer[:, :, 0], req_to_token, b_seq_len, softmax_scale=sm_scale)
    o.copy_(out)
"""


def vllm_modules() -> set[str]:
    return {name for name in sys.modules if name.split(".")[0] == "vllm"}


def assert_right(batch: DecodeBatch, out: Tensor) -> None:
    assert check_result(batch, expected_sequences(batch), out, None).detail == ""


def test_a_peer_that_is_nowhere_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for folder in (None, tmp_path):
        loaded, absent = load_peers(PEER_NAMES, folder)
        assert loaded == ()
        assert set(absent) == set(PEER_NAMES)
        assert all("not installed" in reason for reason in absent.values()), absent
    assert "_flashmla_C.abi3.so is in the folder of peers" in absent["flash_mla"]


def test_unknown_names_and_folders_are_refused(tmp_path: Path) -> None:
    for name in ("tensorrt", "pagedmla", "aiter"):
        with pytest.raises(InvalidArgument, match="vllm_triton"):
            make_peer(name)
    with pytest.raises(InvalidArgument, match="a folder"):
        load_peers([], tmp_path / "none")


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"not a library")
    (tmp_path / "_vllm_fa3_C.abi3.so").write_bytes(b"not a library")
    (tmp_path / "vllm_triton_decode.py").write_text("import a_module_that_nobody_has\n")
    before = vllm_modules()
    loaded, absent = load_peers(("flash_mla", "fa3", "vllm_triton"), tmp_path)
    assert loaded == ()
    assert vllm_modules() == before
    assert absent["flash_mla"].startswith("_flashmla_C.abi3.so does not load")
    assert absent["fa3"].startswith("_vllm_fa3_C.abi3.so does not load")
    assert "a_module_that_nobody_has" in absent["vllm_triton"]


def test_vllms_lone_file_runs_and_leaves_no_stand_in_behind(tmp_path: Path) -> None:
    (tmp_path / "vllm_triton_decode.py").write_text(LONE_FILE)
    before = vllm_modules()
    loaded, absent = load_peers(["vllm_triton"], tmp_path)
    assert absent == {}
    assert vllm_modules() == before
    assert loaded[0].version.startswith("vllm, file ")
    batch = small_batch(1300, 5, page_size=64)
    assert_right(batch, loaded[0].prepare(batch)())


def test_a_batch_of_the_benchmark_is_a_call_of_the_kit() -> None:
    batch = small_batch(131, 7, 33, q_len=2, dtype=torch.float16)
    call = call_of(batch)
    for name in ("q", "kv_cache", "block_table", "seq_lens"):
        assert getattr(call, name) is getattr(batch, name)
    assert call.softmax_scale == SOFTMAX_SCALE == 192**-0.5
    assert call.causal
    spec = call.spec
    assert (spec.seq_lens, spec.query_counts, spec.ragged) == ((131, 7, 33), (2, 2, 2), False)
    assert (spec.num_heads, spec.page_size, spec.q_dtype, spec.cache_dtype) == (
        3,
        16,
        torch.float16,
        torch.float16,
    )
    out, _ = pagedmla.decode(call.q, call.kv_cache, call.block_table, call.seq_lens, **call.semantics())
    assert_right(batch, out)


@pytest.mark.parametrize("q_len", [1, 2])
def test_flash_mla_is_called_by_its_convention(monkeypatch: pytest.MonkeyPatch, q_len: int) -> None:
    schedule, splits = torch.zeros(1), torch.zeros(1)
    calls = []

    def dense_decode_fwd(
        q: Tensor,
        k_cache: Tensor,
        head_size_v: int,
        seqlens_k: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        is_causal: bool,
        tile_scheduler_metadata: Tensor | None,
        num_splits: Tensor | None,
        out: Tensor | None,
    ) -> tuple[Tensor, object, Tensor, Tensor]:
        calls.append((tile_scheduler_metadata, num_splits, out))
        assert head_size_v == 512
        assert k_cache.shape[2] == 1
        result, _ = pagedmla.reference.decode(
            q.flatten(0, 1),
            k_cache[:, :, 0],
            block_table,
            seqlens_k,
            softmax_scale=softmax_scale,
            causal=is_causal,
        )
        out = torch.empty(*q.shape[:3], 512, dtype=q.dtype) if out is None else out
        # no tensor: lse is not touched
        return out.copy_(result.view(out.shape)), "lse", schedule, splits

    monkeypatch.setattr(torch.ops._flashmla_C, "dense_decode_fwd", dense_decode_fwd, raising=False)
    batch = small_batch(131, 7, q_len=q_len, page_size=64)
    run = make_peer("flash_mla").prepare(batch)
    assert_right(batch, run())
    # the schedule of the first call, made while preparing, is used again, and so is the output of one query token
    assert calls[0] == (None, None, None)
    assert calls[1][0] is schedule
    assert calls[1][1] is splits
    assert (calls[1][2] is None) == (q_len > 1)
    assert q_len > 1 or run().data_ptr() == run().data_ptr()


FA3_ARGUMENTS = (
    "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k"
    " page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale"
    " causal window_left window_right softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin sinks"
    " cp_world_size cp_rank cp_tot_seqused_k"
)
"""Of the operation in vLLM's fork, in order."""


def test_fa3_is_called_by_its_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    def fwd(*arguments: Any) -> tuple[Tensor, object]:
        a = SimpleNamespace(**dict(zip(FA3_ARGUMENTS.split(), arguments, strict=True)))
        none = "k_new v_new out cu_seqlens_k seqused_q kv_batch_idx rotary_cos q_descale scheduler_metadata sinks pack_gqa"
        assert all(getattr(a, name) is None for name in none.split())
        assert (a.window_left, a.window_right, a.softcap, a.num_splits, a.cp_world_size) == (
            -1,
            -1,
            0.0,
            0,
            1,
        )
        # keys: 9 pages of 16 tokens hold the longest sequence
        assert (a.max_seqlen_q, a.max_seqlen_k) == (2, 144)
        assert a.cu_seqlens_q.tolist() == [0, 2, 4, 6]
        out, _ = pagedmla.reference.decode(
            (a.q_v, a.q),
            torch.cat([a.v, a.k], dim=-1)[:, :, 0],
            a.page_table,
            a.seqused_k,
            cu_seqlens_q=a.cu_seqlens_q,
            softmax_scale=a.softmax_scale,
            causal=a.causal,
        )
        return out.to(a.q.dtype), "lse"

    monkeypatch.setattr(torch.ops._vllm_fa3_C, "fwd", fwd, raising=False)
    batch = small_batch(131, 7, 33, q_len=2)
    assert_right(batch, make_peer("fa3").prepare(batch)())


FLASHINFER = """
import torch
class BatchMLAPagedAttentionWrapper:
    plans = 0
    def __init__(self, workspace, use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr, backend):
        self.buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self.backend = backend
    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
             sm_scale, q_data_type, kv_data_type):
        type(self).plans += 1
        for buffer, given in zip(self.buffers, (qo_indptr, kv_indptr, kv_indices, kv_len_arr)):
            buffer[:len(given)] = given
        self.__dict__.update(locals())
    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None):
        import pagedmla
        pages = self.kv_indptr.diff()
        table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for row, (start, count) in enumerate(zip(self.kv_indptr.tolist(), pages.tolist())):
            table[row, :count] = self.kv_indices[start : start + count]
        assert (self.head_dim_ckv, self.head_dim_kpe, self.page_size) == (512, 64, ckv_cache.shape[1])
        result, _ = pagedmla.reference.decode(
            (q_nope, q_pe), torch.cat([ckv_cache, kpe_cache], -1), table, self.kv_len_arr, cu_seqlens_q=self.qo_indptr,
            softmax_scale=self.sm_scale, causal=self.causal)
        return out.copy_(result)
"""


def test_flashinfer_out_of_a_folder_is_called_by_its_convention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("__version__ = '9.9'\n")
    (tmp_path / "flashinfer" / "mla.py").write_text(FLASHINFER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    loaded, absent = load_peers(["flashinfer_fa3", "flashinfer_fa2"], tmp_path)
    assert absent == {}
    assert [(peer.name, peer.version) for peer in loaded] == [
        ("flashinfer_fa3", "flashinfer 9.9"),
        ("flashinfer_fa2", "flashinfer 9.9"),
    ]
    batch = small_batch(131, 7, 33, q_len=2)
    run = loaded[0].prepare(batch)
    assert_right(batch, run())
    assert_right(batch, run())
    # planned outside of the time, and asked for no lse: run() of this stand-in takes none
    assert sys.modules["flashinfer.mla"].BatchMLAPagedAttentionWrapper.plans == 1


def test_a_peer_is_asked_for_no_lse_and_gives_out_alone() -> None:
    class Watched(Ours):
        asked: Any = None

        def prepare(self, call: Any, options: Any, out: Any = None, lse: Any = None) -> Any:
            self.asked = options
            prepared = super().prepare(call, {}, out, lse)
            return PreparedCall(prepared.run)

        def refuses(self, spec: Any, options: Any, device: torch.device) -> str | None:
            return super().refuses(spec, {}, device)

    adapter = Watched("torch")
    peer, batch = AdapterPeer(adapter), small_batch(131, 7)
    assert (peer.name, peer.version, peer.load(None)) == ("pagedmla:torch", pagedmla.__version__, None)
    assert peer.supports(batch) is None
    assert_right(batch, peer.prepare(batch)())
    assert adapter.asked == {"return_lse": False}
    eight_bits = dataclasses.replace(batch, q=batch.q.to(torch.float8_e4m3fn))
    assert peer.supports(eight_bits) is not None


MODULE = """
import pagedmla
def right(q, kv_cache, block_table, seq_lens, *, softmax_scale):
    out, lse = pagedmla.reference.decode(q, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale)
    return out.to(q.dtype), lse
number = 3
"""


def test_a_function_of_somebodys_own_is_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_peer_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    loaded, absent = load_peers(["a_peer_of_mine:right"], None)
    assert absent == {}
    assert loaded[0].name == "a_peer_of_mine:right"
    batch = small_batch(131, 7)
    assert loaded[0].supports(batch) is None
    # it has no return_lse, and is asked for none
    assert_right(batch, loaded[0].prepare(batch)())
    for name in ("a_peer_of_mine:number", "a_peer_of_mine:nothing", "a_module_that_nobody_has:x"):
        with pytest.raises(InvalidArgument, match=r"^peers: wanted"):
            make_peer(name)


DEEPSEEKS = """
import torch
__version__ = "1.2"
def get_mla_metadata(*arguments):
    return torch.zeros(1), torch.zeros(1)
def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, splits, softmax_scale, causal):
    import pagedmla
    out, _ = pagedmla.reference.decode(
        q.flatten(0, 1), k_cache[:, :, 0], block_table, cache_seqlens, softmax_scale=softmax_scale, causal=causal)
    return out.to(q.dtype).view(*q.shape[:3], 512), torch.zeros(len(q), q.shape[2], q.shape[1])
"""


def test_deepseeks_own_package_is_flash_mla_where_vllms_build_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "flash_mla.py").write_text(DEEPSEEKS)
    loaded, absent = load_peers(["flash_mla"], tmp_path)
    assert absent == {}
    assert (loaded[0].name, loaded[0].version) == ("flash_mla", "flash_mla 1.2")
    batch = small_batch(131, 7, page_size=64)
    assert_right(batch, loaded[0].prepare(batch)())


def test_flashinfers_plan_is_timed_alone_and_like_for_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Wrapper:
        def __init__(self, workspace: Tensor, backend: str) -> None:
            assert backend == "fa3"

        def plan(self, *arguments: object) -> None:
            seen.append(arguments)

    monkeypatch.setitem(
        sys.modules,
        "flashinfer.mla",
        SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper),  # type: ignore[arg-type]
    )
    batch = small_batch(131, 7, 33, q_len=2)
    found = time_plan("flashinfer_fa3", batch, lambda: batch.q, rounds=2)
    assert found is not None
    assert found.where == "host"
    assert found.time.fastest_us > 0
    assert len(seen) == 3 * (2 + 1)
    # the same arguments as the adapter's, which the decode that is timed was planned with
    expected = _plan_arguments(call_of(batch))
    assert len(seen[0]) == len(expected)
    for given, wanted in zip(seen[0], expected, strict=True):
        assert torch.equal(given, wanted) if isinstance(wanted, Tensor) else given == wanted


def test_flash_mla_that_plans_is_given_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def dense_decode_fwd(*arguments: object) -> tuple[Tensor, None, None, None]:
        calls.append(arguments)
        return torch.zeros(2, 1, 3, 512), None, None, None

    monkeypatch.setattr(torch.ops._flashmla_C, "dense_decode_fwd", dense_decode_fwd, raising=False)
    batch = small_batch(131, 7, page_size=64)
    assert flash_mla_that_plans(batch)().shape == (2, 1, 3, 512)
    assert calls[0][-3:] == (None, None, None)
    assert calls[0][2] == 512


@pytest.mark.parametrize("name", ["fa3", "vllm_triton", "pagedmla", "flash_mla"])
def test_who_plans_nothing_ahead_has_no_plan(name: str) -> None:
    batch = small_batch(7, page_size=64)
    assert time_plan(name, batch, lambda: batch.q) is None


@pytest.mark.parametrize("name", PEER_NAMES)
def test_no_peer_takes_a_cpu_or_32_bits(name: str) -> None:
    assert make_peer(name).supports(small_batch(7, page_size=64)) is not None


def test_what_peers_take_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "Target", SimpleNamespace(detect=lambda device: HOPPER))
    monkeypatch.setattr(DecodeBatch, "device", torch.device("cuda"))

    def refusal(name: str, batch: DecodeBatch) -> str | None:
        return make_peer(name).supports(batch)

    usual, other_page = small_batch(7, page_size=64), small_batch(7, page_size=16)
    two, wide = small_batch(7, page_size=64, q_len=2), small_batch(7, page_size=64, dtype=torch.float32)
    for name in PEER_NAMES:
        assert refusal(name, usual) is None
        assert (refusal(name, other_page) is None) == (name != "flash_mla")
        assert (refusal(name, two) is None) == (name != "vllm_triton")
        assert "float32" in (refusal(name, wide) or "")
