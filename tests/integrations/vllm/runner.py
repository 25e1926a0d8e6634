"""What vLLM's model runner keeps between steps, and how it hands a step to a builder.

After vLLM 0.21.0, v1/worker/gpu_model_runner.py (GMR) and v1/worker/block_table.py: buffers that live as long as the engine,
written in place; slices of them in every step; padding for captured graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from integrations.vllm.stand_in import CommonAttentionMetadata
from torch import Tensor

NULL_BLOCK = 0
"""What rows of padding hold (GMR:2179)."""
STALE = 2**30
"""A page that no cache has: what a finished request may have left in a row past its new one's end."""


class Runner:
    """The persistent buffers.

    Attributes:
        block_table: i32 [max_num_seqs, width].
        seq_lens: i32 [max_num_seqs]; 0 past the step's requests (GMR:2034).
        query_starts: i32 [max_num_seqs + 1], on the device; the last value repeats.
        query_starts_on_host: the same on the CPU.
    """

    def __init__(self, max_num_seqs: int, width: int) -> None:
        self.block_table = torch.full((max_num_seqs, width), STALE, dtype=torch.int32)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self.query_starts = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self.query_starts_on_host = torch.zeros(max_num_seqs + 1, dtype=torch.int32)

    def write(self, call: dict[str, Any], q_lens: Sequence[int], num_reqs: int) -> None:
        """Writes a step's requests, and padding up to ``num_reqs``.

        Args:
            call: of ``batches.arguments``.
            q_lens: query tokens of each request.
        """
        table = call["block_table"]
        count, width = table.shape
        self.block_table[:count, :width] = table
        self.block_table[count:num_reqs] = NULL_BLOCK
        self.seq_lens.zero_()
        self.seq_lens[:count] = call["seq_lens"]
        starts = list(accumulate(q_lens, initial=0))
        starts += [starts[-1]] * (len(self.query_starts) - len(starts))
        self.query_starts_on_host[:] = torch.tensor(starts, dtype=torch.int32)
        self.query_starts.copy_(self.query_starts_on_host)

    def step(self, num_reqs: int, num_tokens: int, max_q_len: int) -> CommonAttentionMetadata:
        """The step for a builder (GMR:2207), padding included."""
        return CommonAttentionMetadata(
            query_start_loc=self.query_starts[: num_reqs + 1],
            query_start_loc_cpu=self.query_starts_on_host[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=max_q_len,
            max_seq_len=int(self.seq_lens.max()),
            block_table_tensor=self.block_table[:num_reqs],
        )


def layer_queries(q: Tensor, num_tokens: int, rank: int) -> tuple[Tensor, Tensor]:
    """(q_nope, q_pe) as ``forward_mqa`` gets them, neither of them dense: see mla_attention.py:696 and 739.

    Args:
        q: [tokens, num_heads, rank + rope].
        num_tokens: rows, padding included, which holds NaN.
        rank: kv_lora_rank.
    """
    tokens, heads, width = q.shape
    rope = width - rank
    nope = torch.full((heads, num_tokens, rank), torch.nan, dtype=q.dtype).transpose(0, 1)
    # a slice of heads before absorption: 128 numbers come before the rotated ones
    whole = torch.full((num_tokens, heads, 128 + rope), torch.nan, dtype=q.dtype)
    nope[:tokens] = q[..., :rank]
    whole[:tokens, :, 128:] = q[..., rank:]
    return nope, whole[..., 128:]
