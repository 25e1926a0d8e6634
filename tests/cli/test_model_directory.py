"""A missing or damaged model directory is one clear line on stderr, exit status 2, and no traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagedmla.cli.model_directory import check_model_directory, load_model
from pagedmla.contract.errors import InvalidArgument

from .conftest import error_line, run_cli

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def truncate(directory: Path, keep: Callable[[int], int]) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[: keep(len(content))])


def shard(directory: Path, index: object, rename: str | None) -> None:
    (directory / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    if rename is not None:
        (directory / WEIGHTS).rename(directory / rename)


def as_llama(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 32}))


def _set_in_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _add_code(directory: Path) -> None:
    """A directory whose own code would have to be run: it is not, and nobody is asked."""
    (directory / "configuration_own.py").write_text("raise SystemExit('the code was run')")
    auto_map = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "configuration_own.Own"}
    _set_in_config(directory, model_type="own", auto_map=auto_map)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (shutil.rmtree, "no such directory"),
    "a file": (lambda d: (shutil.rmtree(d), d.write_text("x")), "not a directory"),
    "config nested": (lambda d: (d / "config.json").write_text("[" * 200_000), "config.json cannot be read"),
    "rank no number": (lambda d: _set_in_config(d, kv_lora_rank=True), "not an MLA model"),
    "rank zero": (lambda d: _set_in_config(d, kv_lora_rank=0), "not an MLA model"),
    "size a word": (lambda d: _set_in_config(d, num_hidden_layers="four"), "cannot load it"),
    "size a fraction": (lambda d: _set_in_config(d, vocab_size=1.5), "cannot load it"),
    "code in it": (lambda d: _add_code(d), "cannot load it"),
    "empty": (lambda d: (shutil.rmtree(d), d.mkdir()), "no config.json in it"),
    "config cut": (
        lambda d: (d / "config.json").write_text('{"model_type": "deeps'),
        "config.json cannot be read",
    ),
    "config not text": (
        lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x80"),
        "config.json cannot be read",
    ),
    "config a list": (lambda d: (d / "config.json").write_text("[1]"), "config.json holds a list"),
    "config empty": (lambda d: (d / "config.json").write_text(""), "config.json cannot be read"),
    "not MLA": (as_llama, "(model_type llama) has no kv_lora_rank: not an MLA model"),
    "rank null": (lambda d: edit_config(d, kv_lora_rank=None), "has no kv_lora_rank"),
    "unknown type": (lambda d: edit_config(d, model_type="nothing_like_it"), "Transformers cannot load it"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "neither model.safetensors nor"),
    "weights empty": (lambda d: truncate(d, lambda n: 0), "model.safetensors is damaged"),
    "header cut": (lambda d: truncate(d, lambda n: 100), "model.safetensors is damaged"),
    "cut in half": (lambda d: truncate(d, lambda n: n // 2), "model.safetensors is damaged"),
    "last byte lost": (lambda d: truncate(d, lambda n: n - 1), "model.safetensors is damaged"),
    "not safetensors": (lambda d: (d / WEIGHTS).write_bytes(b"GIF89a" * 50), "model.safetensors is damaged"),
    "index cut": (lambda d: shard(d, '{"weight_map', None), "index.json cannot be read"),
    "index empty": (lambda d: shard(d, {"weight_map": {}}, None), "has no weight_map"),
    "shard missing": (
        lambda d: shard(d, {"weight_map": {"a": "b.safetensors"}}, None),
        "b.safetensors is missing",
    ),
    "layer missing": (lambda d: edit_config(d, num_hidden_layers=3), "lack"),
    "other sizes": (lambda d: edit_config(d, hidden_size=64), "Transformers cannot load it"),
    "no tokenizer": (
        lambda d: [file.unlink() for file in d.glob("token*")],
        "no tokenizer loads from it",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_clear_line(model_copy: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    harm(model_copy)
    result = run_cli("generate", "the sea", "--model", str(model_copy), "--device", "cpu")
    line = error_line(result)
    assert reason in line
    assert str(model_copy) in line
    assert "model: wanted a directory" in line
    assert result.stdout == ""


def test_a_real_process_prints_no_traceback(model_copy: Path) -> None:
    truncate(model_copy, lambda size: size // 2)
    command = [
        sys.executable,
        "-m",
        "pagedmla.cli",
        "generate",
        "--model",
        str(model_copy),
        "--device",
        "cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "model.safetensors is damaged" in done.stderr


def test_the_undamaged_copy_loads(model_copy: Path) -> None:
    check_model_directory(model_copy)
    loaded = load_model(model_copy, torch.device("cpu"), torch.float32)
    assert loaded.encode("the sea was") == [2, 3, 4]
    assert loaded.decode([2, 3, 4, 1]) == "the sea was"
    assert loaded.model.dtype == torch.float32


def test_a_sharded_directory_loads(model_copy: Path) -> None:
    import safetensors

    with safetensors.safe_open(model_copy / WEIGHTS, framework="pt") as handle:
        names = list(handle.keys())
    part = "model-00001-of-00001.safetensors"
    shard(model_copy, {"metadata": {}, "weight_map": dict.fromkeys(names, part)}, rename=part)
    assert load_model(model_copy, torch.device("cpu"), torch.float32).model.training is False


def test_the_error_is_the_packages_own(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_model_directory(tmp_path / "nothing")
    assert (caught.value.code, caught.value.argument) == ("model_directory", "model")
