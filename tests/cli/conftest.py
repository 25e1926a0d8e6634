"""A tiny model of the DeepSeek-V3 architecture on disk: made once, copied by tests that damage it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from pagedmla.cli.main import app

WORDS = ["<s>", "</s>", "the", "sea", "was", "calm", "and", "bright", "."]


def run_cli(*arguments: str) -> Result:
    """Runs the command in this process; an exception that it should not raise is raised here."""
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def error_line(result: Result) -> str:
    """The one line that a usage error prints; fails unless that is all there is, with exit status 2."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("pagedmla: ")
    return lines[0]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random model: 2 layers, 4 heads, latent 16 + rope 8, nope 8, value 12; fp32."""
    import tokenizers
    import transformers

    directory = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(directory)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<s>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<s>"
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of ``tiny_model`` that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))
