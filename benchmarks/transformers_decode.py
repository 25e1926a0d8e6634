"""Decode at a long context on a CPU: stock Transformers, the last release that cached keys and values, and pagedmla.

    python benchmarks/transformers_decode.py [--context 4096] [--json FILE]

One random DeepSeek-V3 model of 149 M parameters (8 dense layers, 16 heads, 512/64/128/128, float32), its weights written once
and read by every contender.  Each contender is a process of its own (benchmarks/decode_worker.py) that prefills the same
prompt in chunks of 512 tokens and then generates greedily; a step is what ``model.generate`` takes for one token.

    stock 5.14     caches decompressed keys and values; installed next to this script's packages by pip, on first use
    stock          the Transformers that is installed: caches the latent, expands all of it in every layer at every step
    pagedmla       the same Transformers after enable(model), with a paged latent cache

A contender's tokens must be those of the others, and its processes must have had both cores; otherwise it is said.
"""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from pagedmla.bench.machine import machine_line
from pagedmla.bench.results import write_result

OLD_TRANSFORMERS = "5.14.1"
WORKER = Path(__file__).with_name("decode_worker.py")


def install_old_transformers() -> Path:
    """Puts the last release with a decompressed cache, and what it needs besides torch, into a folder of its own."""
    folder = Path(sys.prefix) / f"transformers-{OLD_TRANSFORMERS}"
    if not (folder / "transformers").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*command, f"transformers=={OLD_TRANSFORMERS}"], check=True)
    return folder


def save_model(folder: Path) -> int:
    """Writes the random model; returns its number of parameters."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        first_k_dense_replace=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        # random weights of the default size give logits that are all alike: greedy choices would hang on rounding
        initializer_range=0.06,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run_worker(contender: str, model: Path, context: int, steps: int, overlay: Path | None) -> dict[str, Any]:
    """One contender in its own process; its figures."""
    environment = dict(os.environ)
    if overlay is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(overlay), environment.get("PYTHONPATH", "")]))
    command = [sys.executable, str(WORKER), contender, str(model), str(context), str(steps)]
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{contender}: the worker ended with {finished.returncode}")
    return json_module.loads(finished.stdout.strip().splitlines()[-1])


def main(
    context: Annotated[int, typer.Option(min=16, help="tokens of the prompt")] = 4096,
    steps: Annotated[int, typer.Option(min=2, help="tokens generated, of which the first is prefill's")] = 17,
    rounds: Annotated[int, typer.Option(min=1, help="processes per contender, taken in turn")] = 2,
    json: Annotated[Path | None, typer.Option(help="write the figures there")] = None,
) -> None:
    """Prints a table, a row for each contender, and the ratios."""
    console = Console()
    contenders = [("stock-old", install_old_transformers()), ("stock", None), ("pagedmla", None)]
    with tempfile.TemporaryDirectory() as folder:
        parameters = save_model(Path(folder))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in contenders}
        for number in range(rounds):
            for name, overlay in contenders:
                console.print(f"round {number + 1} of {rounds}: {name} ...", style="dim")
                runs[name].append(run_worker(name, Path(folder), context, steps, overlay))
    # the faster process: another program's work only ever adds time
    best = {name: min(found, key=lambda run: run["step_ms"]) for name, found in runs.items()}
    same = len({tuple(run["tokens"]) for found in runs.values() for run in found}) == 1
    table = Table(title=f"{parameters / 1e6:.0f} M parameters, context {context}; {machine_line()}")
    for heading in ("contender", "Transformers", "cache bytes/token", "ms/step", "tokens/s", "prefill s", "cpu/wall"):
        table.add_column(heading, justify="right")
    for name, run in best.items():
        table.add_row(
            name,
            run["transformers"],
            f"{run['cache_bytes_per_token']:,.0f}",
            f"{run['step_ms']:.1f}",
            f"{1e3 / run['step_ms']:.2f}",
            f"{run['prefill_s']:.1f}",
            f"{run['cpu_over_wall']:.2f}",
        )
    console.print(table)
    ours = best["pagedmla"]["step_ms"]
    ratios = {name: best[name]["step_ms"] / ours for name in ("stock", "stock-old")}
    console.print(f"pagedmla decodes {ratios['stock']:.1f}x as fast as stock {version('transformers')}", end=" ")
    console.print(f"and {ratios['stock-old']:.1f}x as fast as {OLD_TRANSFORMERS}'s decompressed cache")
    console.print("tokens: the same in every process" if same else "tokens DIFFER between processes", style="bold")
    if json is not None:
        figures = {"parameters": parameters, "context": context, "steps": steps, "runs": runs, "ratios": ratios}
        write_result(json, {**figures, "tokens_agree": same})
    if not same:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
