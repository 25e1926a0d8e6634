"""Peers: where they are looked for, what is said when they are not there, and that each is called by its own convention.

The peers themselves need a GPU.  Stand-ins with their signatures compute with the reference from exactly what they are handed,
so an argument in the wrong place gives a wrong value.
"""

from __future__ import annotations

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
from pagedmla.bench.peers.peer import find_software
from pagedmla.bench.verify import check_result
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
    with pytest.raises(InvalidArgument, match="vllm_triton"):
        make_peer("tensorrt")
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


def test_the_version_is_the_wheels_or_the_files_own(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"abc")
    found = find_software("somebody", ("inner/x.so",), tmp_path)
    assert not isinstance(found, str)
    assert found.path == tmp_path / "x.so"
    assert found.version == "somebody, file ba7816bf8f01"  # SHA-256 of "abc"
    (tmp_path / "somebody-1.2.dist-info").mkdir()
    found = find_software("somebody", ("inner/x.so",), tmp_path)
    assert not isinstance(found, str)
    assert (found.version, found.installed) == ("somebody 1.2", False)
    installed = find_software("torch", ("nn/modules/linear.py",), None)
    assert not isinstance(installed, str)
    assert (installed.installed, installed.path.name) == (True, "linear.py")
    assert "is installed without nothing.so" in str(find_software("torch", ("nothing.so",), None))


def test_vllms_lone_file_runs_and_leaves_no_stand_in_behind(tmp_path: Path) -> None:
    (tmp_path / "vllm_triton_decode.py").write_text(LONE_FILE)
    before = vllm_modules()
    loaded, absent = load_peers(["vllm_triton"], tmp_path)
    assert absent == {}
    assert vllm_modules() == before
    batch = small_batch(1300, 5, page_size=64)
    assert_right(batch, loaded[0].prepare(batch)())


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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        calls.append((tile_scheduler_metadata, num_splits, out))
        assert head_size_v == 512
        assert k_cache.shape[2] == 1
        result, lse = pagedmla.reference.decode(
            q.flatten(0, 1),
            k_cache[:, :, 0],
            block_table,
            seqlens_k,
            softmax_scale=softmax_scale,
            causal=is_causal,
        )
        out = torch.empty(*q.shape[:3], 512, dtype=q.dtype) if out is None else out
        return out.copy_(result.view(out.shape)), lse, schedule, splits

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
    def fwd(*arguments: Any) -> tuple[Tensor]:
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
        assert (a.max_seqlen_q, a.max_seqlen_k) == (2, 131)
        out, _ = pagedmla.reference.decode(
            (a.q_v, a.q),
            torch.cat([a.v, a.k], dim=-1)[:, :, 0],
            a.page_table,
            a.seqused_k,
            cu_seqlens_q=a.cu_seqlens_q,
            softmax_scale=a.softmax_scale,
            causal=a.causal,
        )
        return (out.to(a.q.dtype),)

    monkeypatch.setattr(torch.ops._vllm_fa3_C, "fwd", fwd, raising=False)
    batch = small_batch(131, 7, 33, q_len=2)
    assert_right(batch, make_peer("fa3").prepare(batch)())


FLASHINFER = """
import torch
class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace, backend):
        self.backend = backend
    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
             sm_scale, q_data_type, kv_data_type):
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
    assert_right(batch, loaded[0].prepare(batch)())


@pytest.mark.parametrize("name", PEER_NAMES)
def test_no_peer_takes_a_cpu_or_32_bits(name: str) -> None:
    assert make_peer(name).supports(small_batch(7, page_size=64)) is not None


def test_what_peers_take_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(name: str, batch: DecodeBatch) -> str | None:
        monkeypatch.setitem(batch.__dict__, "target", HOPPER)
        monkeypatch.setattr(DecodeBatch, "device", torch.device("cuda"))
        return make_peer(name).supports(batch)

    usual, other_page = small_batch(7, page_size=64), small_batch(7, page_size=16)
    two, wide = small_batch(7, page_size=64, q_len=2), small_batch(7, page_size=64, dtype=torch.float32)
    for name in PEER_NAMES:
        assert refusal(name, usual) is None
        assert (refusal(name, other_page) is None) == (name != "flash_mla")
        assert (refusal(name, two) is None) == (name != "vllm_triton")
        assert "float32" in (refusal(name, wide) or "")
    assert SOFTMAX_SCALE == 192**-0.5
