"""``pagedmla generate`` writes what stock Transformers writes, says what the cache costs, and fails clearly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedmla.cli import generation
from pagedmla.contract.support import BACKENDS

from .conftest import error_line, run_cli

ON_CPU = ("--device", "cpu")


def stock_text(prompt: str, tokens: int) -> str:
    """What the embedded model goes on with, greedily, made without any of the package's code but its files."""
    import transformers

    from pagedmla import embedded

    model = transformers.AutoModelForCausalLM.from_pretrained(embedded.model_dir(), dtype=torch.float32)
    ids = torch.tensor([[0, *prompt.encode()]])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return bytes(byte for byte in made[0, ids.shape[1] :].tolist() if byte).decode(errors="replace")


def split_output(stdout: str) -> tuple[str, str]:
    """(text, table)."""
    text, box, table = stdout.partition("┌")
    return text, box + table


def words(table: str) -> str:
    """The table without its lines, in one line."""
    return " ".join(table.replace("│", " ").split())


def test_the_embedded_model_writes_what_stock_transformers_writes() -> None:
    prompt = "And it came to pass, "
    result = run_cli("generate", prompt, "--tokens", "25", "--page-size", "7", *ON_CPU)
    assert result.exit_code == 0, result.output
    text, table = split_output(result.stdout)
    assert text == prompt + stock_text(prompt, 25) + "\n"
    # 4 layers of 512 + 64 numbers, and of 8 heads of 64 + 64 + 64, in fp32
    sizes = f"{4 * 576 * 4:,} (keys and values, decompressed: {4 * 8 * 192 * 4:,}, 2.7x)"
    assert f"cache bytes per token {sizes}" in words(table)
    assert re.search(r"backend\s*│ torch, pages of 7 tokens", table)
    assert re.search(r"tokens per second\s*│ \d+\.\d", table)
    assert "stock" not in table


def test_compare_agrees_token_by_token() -> None:
    result = run_cli("generate", "The whale ", "--tokens", "20", "--compare", *ON_CPU)
    assert result.exit_code == 0, result.output
    _, table = split_output(result.stdout)
    assert "the same 20 tokens" in table
    difference = re.search(r"log-prob difference\|\s*│ (\S+)", table)
    assert difference is not None
    assert 0 <= float(difference[1]) < 1e-4


def test_sampling_compares_too_and_follows_the_seed(tiny_model: Path) -> None:
    common = (
        "generate",
        "the sea",
        "--model",
        str(tiny_model),
        "--tokens",
        "30",
        "--temperature",
        "1",
        *ON_CPU,
    )
    one, again, other = (run_cli(*common, "--compare", "--seed", seed) for seed in ("1", "1", "2"))
    assert (one.exit_code, again.exit_code, other.exit_code) == (0, 0, 0)
    assert "the same" in one.stdout
    assert split_output(one.stdout)[0] == split_output(again.stdout)[0]
    assert split_output(one.stdout)[0] != split_output(other.stdout)[0]


@pytest.fixture
def _wrong_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes the fourth token of what stock Transformers is said to have made."""
    real = generation.run_stock

    def wrong(*arguments: Any) -> generation.Run:
        run = real(*arguments)
        ids = [*run.token_ids[:3], run.token_ids[3] ^ 1, *run.token_ids[4:]]
        return generation.Run(ids, run.logits, run.first_token_s, run.tokens_per_s)

    monkeypatch.setattr(generation, "run_stock", wrong)


@pytest.mark.usefixtures("_wrong_stock")
def test_a_disagreement_is_named_and_the_exit_status_is_1() -> None:
    result = run_cli("generate", "The whale ", "--tokens", "8", "--compare", *ON_CPU)
    assert result.exit_code == 1
    assert "DIFFERS first at token 3 of 8" in words(result.stdout)


def test_the_backend_that_is_named_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    import pagedmla
    import pagedmla.integrations.transformers

    asked: list[object] = []
    real = pagedmla.decode

    def watched(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(keywords.get("backend"))
        return real(*arguments, **keywords)

    monkeypatch.setattr(pagedmla, "decode", watched)
    common = ("generate", "the sea", "--model", str(tiny_model), "--tokens", "4", *ON_CPU)
    assert run_cli(*common, "--backend", "torch").exit_code == 0
    assert asked
    assert set(asked) == {"torch"}
    asked.clear()
    assert run_cli(*common).exit_code == 0
    assert set(asked) == {None}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_each_precision_runs(tiny_model: Path, dtype: str) -> None:
    result = run_cli(
        "generate", "the", "--model", str(tiny_model), "--dtype", dtype, "--tokens", "3", *ON_CPU
    )
    assert result.exit_code == 0, result.output
    itemsize = 4 if dtype == "fp32" else 2
    assert f"cache bytes per token {2 * 24 * itemsize} (keys and values" in words(result.stdout)


def test_an_empty_prompt_starts_from_the_beginning_of_a_text() -> None:
    result = run_cli("generate", "", "--tokens", "5", *ON_CPU)
    assert result.exit_code == 0, result.output
    assert split_output(result.stdout)[0] == stock_text("", 5) + "\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ("--backend", "cutlass"),
            "backend: wanted None or one of " + ", ".join(BACKENDS) + ", got 'cutlass'",
        ),
        (("--device", "toaster"), "device: wanted a torch device"),
        (("--device", "cuda:99"), "device: wanted"),
        (("--device", "meta"), "device: wanted a device of this machine"),
        (("--model", "no/such/place"), "no/such/place: no such directory"),
        (("--compare", "--dtype", "bf16"), "--compare runs in fp32"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], part: str) -> None:
    result = run_cli("generate", "text", *arguments)
    assert part in error_line(result)
    assert result.stdout == ""


def test_the_model_is_stock_again_after_a_run(tiny_model: Path) -> None:
    from pagedmla.cli.model_directory import load_model

    loaded = load_model(tiny_model, torch.device("cpu"), torch.float32)
    before = loaded.model.config._attn_implementation
    sampling = generation.Sampling(tokens=3)
    request = generation.Request("the sea", sampling, page_size=4, backend=None, keep_logits=True)
    ours = generation.run_paged(loaded, request, show=False)
    assert loaded.model.config._attn_implementation == before
    stock = generation.run_stock(loaded, request)
    assert ours.token_ids == stock.token_ids
    assert ours.logits is not None
    assert stock.logits is not None
    torch.testing.assert_close(ours.logits, stock.logits, rtol=1e-4, atol=1e-4)
