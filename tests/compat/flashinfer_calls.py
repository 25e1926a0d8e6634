"""What the tests of FlashInfer's wrapper share: a call of ours in its words, planned, run, and watched."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from batches import arguments, make_batch
from torch import Tensor

import pagedmla
from pagedmla.compat.flashinfer import BatchMLAPagedAttentionWrapper, wrapper

# everything allocates its own where this is too small; tests of the workspace bring larger ones
NO_WORKSPACE = torch.empty(0, dtype=torch.int8)
LOG2_E = 1.4426950408889634
# of ``run``: what ``pagedmla.decode`` returns
NATURAL = {"return_lse": True, "return_lse_base_on_e": True}


def call_of(
    lens: list[int], q_lens: list[int] | None = None, page_size: int = 16, **options: Any
) -> dict[str, Any]:
    """A batch of these lengths, one query token each unless told, as keyword arguments of ``pagedmla.decode``."""
    layout = options.pop("layout", {})
    return arguments(make_batch(lens, q_lens, **options), page_size, **layout)


def csr(call: dict[str, Any], over: int = 0) -> dict[str, Tensor]:
    """The batch of a call in FlashInfer's words; each sequence holds ``over`` pages too many, whose ids are garbage."""
    page_size, table = call["kv_cache"].shape[1], call["block_table"]
    held = [-(-length // page_size) + over for length in call["seq_lens"].tolist()]
    ids = [table[sequence, :count] for sequence, count in enumerate(held)]
    return {
        "qo_indptr": call["cu_seqlens_q"],
        "kv_indptr": torch.tensor([0, *accumulate(held)], dtype=torch.int32),
        "kv_indices": torch.cat([*ids, table.new_empty(0)]),
        "kv_len_arr": call["seq_lens"],
    }


def statics(call: dict[str, Any]) -> dict[str, Any]:
    """What else ``plan`` takes: all that is not the batch."""
    rank = call["kv_lora_rank"]
    return {
        "num_heads": call["q"].shape[1],
        "head_dim_ckv": rank,
        "head_dim_kpe": call["q"].shape[2] - rank,
        "page_size": call["kv_cache"].shape[1],
        "causal": call["causal"],
        "sm_scale": call["softmax_scale"],
        "q_data_type": call["q"].dtype,
        "kv_data_type": call["kv_cache"].dtype,
    }


def inputs(call: dict[str, Any], apart: bool = False) -> dict[str, Tensor]:
    """What ``run`` takes, the caches as views of one, or as tensors that lie apart."""
    rank, q, cache = call["kv_lora_rank"], call["q"], call["kv_cache"]
    ckv, kpe = cache[..., :rank], cache[..., rank:]
    if apart:
        ckv, kpe = ckv.clone(), kpe.clone()
    return {"q_nope": q[..., :rank], "q_pe": q[..., rank:], "ckv_cache": ckv, "kpe_cache": kpe}


def planned(call: dict[str, Any], over: int = 0, **options: Any) -> BatchMLAPagedAttentionWrapper:
    """A wrapper that is planned for the call; ``options`` replace arguments of its constructor."""
    made = BatchMLAPagedAttentionWrapper(**{"float_workspace_buffer": NO_WORKSPACE} | options)
    made.plan(**csr(call, over), **statics(call))
    return made


def attend(call: dict[str, Any], over: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, natural lse) of a wrapper that is planned for the call; ``options`` replace arguments of ``run``."""
    return planned(call, over).run(**inputs(call) | NATURAL | options)


def ours(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same call of our own; where each sequence has as many query tokens, they need not be told."""
    tensors = [call[name] for name in ("q", "kv_cache", "block_table", "seq_lens")]
    options = {name: call[name] for name in ("softmax_scale", "causal", "kv_lora_rank", "kv_scale")}
    q_lens = call["cu_seqlens_q"].diff().tolist()
    if len(set(q_lens)) > 1:
        options |= {"cu_seqlens_q": call["cu_seqlens_q"], "max_q_len": max(q_lens)}
    return pagedmla.decode(*tensors, **options)


def record_decodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple, dict[str, Any]]]:
    """The arguments of every decode that wrappers make from now on."""
    calls: list[tuple[tuple, dict[str, Any]]] = []

    def spy(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append((tensors, options))
        return pagedmla.decode(*tensors, **options)

    monkeypatch.setattr(wrapper, "decode", spy)
    return calls
