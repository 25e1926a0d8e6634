"""Train the embedded byte-level DeepSeek-V3 model and save it as bf16 safetensors.

The schedule follows a wall-clock budget (``--minutes``) or, for a run that repeats step for step, a step
count (``--steps``). Most of the budget goes to short windows, the rest to windows of the full context length,
so that rotary positions up to ``max_position_embeddings`` are trained. The weights that score best on the
validation split are kept.
"""

import copy
import json
import math
import platform
import sys
import time
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import transformers
import typer
from corpus import load
from evaluate import DEVICE, bits_per_byte, score
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

app = typer.Typer(add_completion=False, help=__doc__)

CONTEXT = 4096
"""Longest window trained on, and ``max_position_embeddings``."""


def config() -> DeepseekV3Config:
    """Architecture: 6.5 M parameters, the latent shape of DeepSeek-V3 (512 + 64 values a token and layer)."""
    return DeepseekV3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        first_k_dense_replace=4,  # as many as there are layers: every MLP is dense
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        num_mtp_layers=0,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


def build(dropout: float, seed: int) -> DeepseekV3ForCausalLM:
    """Initialise the model, with dropout on the embedding and on what each sublayer adds to the residual.

    The architecture has no such dropout of its own, so forward hooks apply it, in training mode only;
    nothing of it is saved.
    """
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM._from_config(config(), attn_implementation="sdpa", dtype=torch.float32)

    def drop(module, _args, output):
        if isinstance(output, tuple):
            return (F.dropout(output[0], dropout, module.training), *output[1:])
        return F.dropout(output, dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        # the sum of 2 L residual branches keeps the variance of one at initialisation
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * len(model.model.layers)))
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    return model


def optimizer(model: torch.nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices but neither the embedding nor the norms' gains."""
    decay = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in n]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-9, fused=fused)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first 2 % of the budget, then cosine down to 1 % of the peak."""
    if progress < 0.02:
        return peak * max(progress / 0.02, 1e-3)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min((progress - 0.02) / 0.98, 1.0))))


class Trainer:
    """One training run over a byte array: steps, learning-rate schedule, validation and the best weights."""

    def __init__(self, model: DeepseekV3ForCausalLM, corpus: Path, device: str, seed: int):
        passages = load(corpus, "train")
        self.data = torch.frombuffer(
            bytearray(b"".join(b"\0" + text for _, text in passages)), dtype=torch.uint8
        ).to(device)
        self.valid = load(corpus, "valid")
        self.model, self.device = model, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.best, self.best_state = math.inf, None

    def autocast(self):
        """bf16 mixed precision on a GPU; fp32 on the CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.startswith("cuda") else nullcontext()

    def loss(self, tokens: int, window: int) -> torch.Tensor:
        """Mean cross entropy, in nats, of ``tokens // window`` random windows of ``window`` bytes each."""
        rows = max(tokens // window, 1)
        starts = torch.randint(
            len(self.data) - window, (rows, 1), device=self.device, generator=self.generator
        )
        ids = self.data[starts + torch.arange(window + 1, device=self.device)].long()
        with self.autocast():
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def validate(self) -> float:
        """Bits per byte of the validation split, in disjoint 1024-byte windows; keeps the best weights."""
        self.model.eval()
        # validation shapes are few and small: compiling them would cost more than it saves
        with torch.compiler.set_stance("force_eager"), self.autocast():
            result = bits_per_byte(score(self.model, self.valid, window=1024, stride=1024, batch=64))
        self.model.train()
        if result < self.best:
            self.best, self.best_state = result, copy.deepcopy(self.model.state_dict())
        return result


def save(model: DeepseekV3ForCausalLM, state: dict[str, torch.Tensor], out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bf16) to ``out``."""
    plain = DeepseekV3ForCausalLM(config())
    plain.load_state_dict({name: value.cpu() for name, value in state.items()})
    plain.generation_config.do_sample = False
    plain.to(torch.bfloat16).save_pretrained(out)


def compile_layers(trainer: Trainer, tokens: int, window: int) -> bool:
    """Compile the decoder layers for both window lengths; fall back to eager layers if that fails."""
    layers = trainer.model.model.layers
    try:
        for layer in layers:
            layer.compile(dynamic=False)
        for length in (window, CONTEXT):
            trainer.loss(tokens, length).backward()
        return True
    # what dynamo, inductor and a missing C compiler raise; the eager layers stay usable after each
    except (RuntimeError, ImportError, OSError) as error:
        typer.echo(f"torch.compile failed, training eagerly: {type(error).__name__}: {error}"[:2000])
        for layer in layers:
            layer._compiled_call_impl = None
        return False
    finally:
        trainer.model.zero_grad(set_to_none=True)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="folder to write the model and run.json to")],
    corpus: Annotated[Path, typer.Option(help="folder that corpus.py wrote")] = Path(".corpus"),
    minutes: Annotated[float, typer.Option(help="wall-clock budget, compilation not counted")] = 5.5,
    steps: Annotated[int, typer.Option(help="end after this many steps instead; 0: no limit")] = 0,
    tokens: Annotated[int, typer.Option(help="bytes of one step")] = 65536,
    window: Annotated[int, typer.Option(help="bytes of a short window")] = 1024,
    long_share: Annotated[float, typer.Option(help="last part of the budget, on 4096-byte windows")] = 0.2,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 2e-3,
    weight_decay: Annotated[float, typer.Option(help="AdamW weight decay")] = 0.1,
    dropout: Annotated[float, typer.Option(help="dropout rate")] = 0.2,
    seed: Annotated[int, typer.Option(help="seed of weights, batches and dropout")] = 1,
    validate_every: Annotated[float, typer.Option(help="part of the budget between validations")] = 0.05,
    compiled: Annotated[bool, typer.Option(help="use torch.compile on the decoder layers")] = True,
    device: Annotated[str, typer.Option(help="torch device")] = DEVICE,
) -> None:
    """Train, keep the best weights by validation, save them in bf16 and record the run in run.json."""
    started = time.perf_counter()
    torch._dynamo.config.cache_size_limit = 32
    model = build(dropout, seed).to(device).train()
    parameters = sum(p.numel() for p in model.parameters())
    trainer = Trainer(model, corpus, device, seed)
    typer.echo(f"{parameters} parameters, {len(trainer.data)} training bytes, device {device}")
    compiled = compiled and compile_layers(trainer, tokens, window)
    typer.echo(f"compiled: {compiled}, set-up took {time.perf_counter() - started:.1f} s")
    adamw = optimizer(model, lr, weight_decay)

    begin, step, progress, next_validation, history = time.perf_counter(), 0, 0.0, validate_every, []
    while progress < 1:
        for group in adamw.param_groups:
            group["lr"] = learning_rate(progress, lr)
        loss = trainer.loss(tokens, CONTEXT if progress >= 1 - long_share else window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0 and device.startswith("cuda"):
            torch.cuda.synchronize()  # the clock below must see finished work, not queued launches
        elapsed = time.perf_counter() - begin
        progress = step / steps if steps else elapsed / (60 * minutes)
        if progress >= min(next_validation, 1.0):
            next_validation += validate_every
            train_bits, valid_bits = loss.item() / math.log(2), trainer.validate()
            rate = round(step * tokens / elapsed)
            history.append({"step": step, "seconds": round(elapsed, 1), "valid": round(valid_bits, 4)})
            typer.echo(
                f"step {step} {elapsed:.0f} s {rate} B/s train {train_bits:.4f} valid {valid_bits:.4f}"
            )
            if len(history) % 5 == 0:
                save(model, trainer.best_state, out)
    wall = time.perf_counter() - begin
    save(model, trainer.best_state, out)
    on_gpu = device.startswith("cuda")
    run = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "arguments": sys.argv[1:],
        "corpus": {
            name: {"bytes": item["bytes"], "sha256": item["sha256"]}
            for name, item in json.loads((corpus / "manifest.json").read_text())["files"].items()
        },
        "parameters": parameters,
        "compiled": compiled,
        "steps": step,
        "bytes_seen": step * tokens,
        "wall_seconds": round(wall, 1),
        "best_valid_bits_per_byte": round(trainer.best, 4),
        "history": history,
    }
    (out / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    typer.echo(f"{step} steps, {step * tokens} bytes seen, {wall:.0f} s, best valid {trainer.best:.4f}")


if __name__ == "__main__":
    app()
