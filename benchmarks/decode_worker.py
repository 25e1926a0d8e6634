"""One contender of benchmarks/transformers_decode.py: generates and prints its figures as one line of JSON.

    python benchmarks/decode_worker.py CONTENDER MODEL_FOLDER CONTEXT STEPS
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

PREFILL_CHUNK = 512


class Clock(LogitsProcessor):
    """Notes when the logits of each step arrive, in wall and processor time."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.wall.append(time.perf_counter())
        self.cpu.append(sum(os.times()[:2]))
        return scores


def cache_bytes(cache: Any) -> float:
    """Bytes of a stock cache per token: every tensor that its layers keep."""
    total = 0
    for layer in cache.layers:
        for kept in (layer.keys, layer.values):
            total += kept.numel() * kept.element_size()
    return total / cache.get_seq_length()


def main(contender: str, folder: str, context: int, steps: int) -> dict[str, Any]:
    """Prefills ``context`` random tokens in chunks and generates ``steps`` tokens greedily."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.randint(1, model.config.vocab_size, (1, context))
    options: dict[str, Any] = {}
    if contender == "pagedmla":
        from pagedmla.integrations.transformers import PagedLatentCache, enable

        enable(model)
        options["past_key_values"] = PagedLatentCache(model.config, page_size=64)
    clock = Clock()
    start = time.perf_counter()
    result = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=steps,
        do_sample=False,
        prefill_chunk_size=PREFILL_CHUNK,
        logits_processor=LogitsProcessorList([clock]),
        return_dict_in_generate=True,
        **options,
    )
    step_times = sorted(after - before for before, after in zip(clock.wall, clock.wall[1:], strict=False))
    cache = result.past_key_values
    per_token = cache.bytes_per_token() if contender == "pagedmla" else cache_bytes(cache)
    return {
        "contender": contender,
        "transformers": transformers.__version__,
        "cache_bytes_per_token": per_token,
        "step_ms": step_times[len(step_times) // 2] * 1e3,
        "fastest_step_ms": step_times[0] * 1e3,
        "prefill_s": clock.wall[0] - start,
        "cpu_over_wall": (clock.cpu[-1] - clock.cpu[0]) / (clock.wall[-1] - clock.wall[0]),
        "tokens": result.sequences[0, context:].tolist(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
