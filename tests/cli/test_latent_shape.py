"""Bytes of keys and values against numbers worked out by hand, and the backend that the table names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedmla.cli.latent_shape import chosen_backend, decompressed_bytes_per_token
from pagedmla.contract.errors import InvalidArgument


class Attention(torch.nn.Module):
    """What an MLA layer of Transformers shows of its sizes: here DeepSeek-V3's."""

    num_heads, kv_lora_rank = 128, 512
    qk_rope_head_dim, qk_nope_head_dim, v_head_dim = 64, 128, 128

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(2, 2)


def test_deepseek_v3_in_bf16() -> None:
    model = torch.nn.Sequential(*(Attention() for _ in range(61))).to(torch.bfloat16)
    # 61 layers of 128 heads of (128 + 64) + 128 numbers, 2 bytes each
    assert decompressed_bytes_per_token(model) == 4_997_120


def test_layers_without_a_latent_do_not_count() -> None:
    model = torch.nn.Sequential(Attention(), torch.nn.Linear(4, 4), Attention())
    assert decompressed_bytes_per_token(model) == 2 * 128 * 320 * 4


def test_a_real_model(tiny_model: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    # 2 layers of 4 heads of (8 + 8) + 12 numbers, 4 bytes each: what an ordinary cache of this model would hold
    assert decompressed_bytes_per_token(model) == 896


def test_the_backend_comes_from_the_table() -> None:
    model = Attention()
    assert chosen_backend(model, 64, None) == "torch"
    assert chosen_backend(model.to(torch.bfloat16), 1, "torch") == "torch"
    with pytest.raises(InvalidArgument) as caught:
        chosen_backend(model, 64, "cutlass")
    assert caught.value.argument == "backend"
