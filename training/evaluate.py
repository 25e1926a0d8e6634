"""Score a byte-level causal language model in bits per byte, and print text it writes.

``python training/evaluate.py MODEL_DIR`` prints the held-out bits per byte, in all and per source, and two
continuations of a prompt. Scoring is in fp32 on the weights as stored (bf16 values widen to fp32 exactly).
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from corpus import load

app = typer.Typer(add_completion=False, help=__doc__)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = "The two sisters walked to the village after breakfast, and"


def windows(passage: bytes, window: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Cut one passage into overlapping windows that together score each of its bytes exactly once.

    Args:
        passage: text bytes, without the separator; id 0 is put in front as the first context.
        window: bytes scored or read in one forward pass at most.
        stride: step between window starts; after the first window each byte has at least
            ``window - stride`` bytes of context.

    Yields:
        (ids, skip): up to ``window + 1`` ids, inputs and shifted targets together, and how many of the
        targets an earlier window has scored.
    """
    ids = [0, *passage]
    scored = 0
    for start in range(0, len(passage), stride):
        end = min(start + window, len(passage))
        yield ids[start : end + 1], scored - start
        scored = end
        if end == len(passage):
            return


@torch.inference_mode()
def score(
    model: torch.nn.Module,
    passages: list[tuple[str, bytes]],
    window: int = 1024,
    stride: int = 512,
    batch: int = 16,
) -> dict[str, tuple[float, int]]:
    """Sum the code length of every passage under the model.

    Args:
        model: causal LM whose ids are bytes; its device is used.
        passages: (source name, text bytes) pairs.
        window: bytes of one forward pass.
        stride: step between windows, see :func:`windows`.
        batch: windows of one forward pass.

    Returns:
        Source name to (bits, bytes).
    """
    device = next(model.parameters()).device
    todo = [(source, *item) for source, text in passages for item in windows(text, window, stride)]
    bits = {source: 0.0 for source, _ in passages}
    count = dict.fromkeys(bits, 0)
    for at in range(0, len(todo), batch):
        part = todo[at : at + batch]
        ids = torch.zeros(len(part), window + 1, dtype=torch.long)
        for row, (_, tokens, _) in enumerate(part):
            ids[row, : len(tokens)] = torch.tensor(tokens)  # zeros after the end cannot be seen: causal
        ids = ids.to(device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        nats = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").double().cpu()
        for row, (source, tokens, skip) in enumerate(part):
            bits[source] += nats[row, skip : len(tokens) - 1].sum().item() / math.log(2)
            count[source] += len(tokens) - 1 - skip
    return {source: (bits[source], count[source]) for source in bits}


def bits_per_byte(scores: dict[str, tuple[float, int]]) -> float:
    """Mean code length over all sources of :func:`score`, in bits per byte."""
    return sum(bits for bits, _ in scores.values()) / sum(count for _, count in scores.values())


def sample(model: torch.nn.Module, prompt: str, length: int, temperature: float, seed: int = 0) -> str:
    """Return what the model writes after ``prompt``, up to ``length`` bytes; temperature 0 is greedy."""
    device = next(model.parameters()).device
    ids = torch.tensor([[0, *prompt.encode()]], device=device)
    torch.manual_seed(seed)
    how = {"do_sample": False}
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0}
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=length, pad_token_id=0, **how)
    return bytes(out[0, ids.shape[1] :].tolist()).decode("utf-8", errors="replace")


@app.command()
def evaluate(
    model_dir: Annotated[Path, typer.Argument(help="folder with config.json and model.safetensors")],
    corpus: Annotated[Path, typer.Option(help="folder that corpus.py wrote")] = Path(".corpus"),
    split: Annotated[str, typer.Option(help="heldout, valid or train")] = "heldout",
    window: Annotated[int, typer.Option(help="bytes of one forward pass")] = 1024,
    stride: Annotated[int, typer.Option(help="bytes between window starts")] = 512,
    prompt: Annotated[str, typer.Option(help="text to continue")] = PROMPT,
    length: Annotated[int, typer.Option(help="bytes to write; 0 writes none")] = 300,
    device: Annotated[str, typer.Option(help="torch device")] = DEVICE,
    json_out: Annotated[Path | None, typer.Option(help="also write the scores to this file")] = None,
) -> None:
    """Print bits per byte of one split and two continuations of a prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device).eval()
    scores = score(model, load(corpus, split), window, stride)
    by_source = {source: round(bits / count, 4) for source, (bits, count) in scores.items()}
    result = {
        "split": split,
        "window": window,
        "stride": stride,
        "bytes": sum(count for _, count in scores.values()),
        "bits_per_byte": round(bits_per_byte(scores), 4),
        "bits_per_byte_by_source": by_source,
    }
    typer.echo(json.dumps(result))
    if json_out:
        json_out.write_text(json.dumps(result, indent=1) + "\n")
    for temperature in (0.0, 0.7) if length else ():
        typer.echo(f"--- T={temperature}\n{prompt}|{sample(model, prompt, length, temperature)}")


if __name__ == "__main__":
    app()
