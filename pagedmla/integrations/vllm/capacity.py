"""How large a step of an engine can get, from its configuration: what buffers are made for, once."""

from __future__ import annotations

from pagedmla.contract.problem import BatchBounds

# the most that vLLM's block tables are wider than a model's longest context asks for (0.21, v1/worker/block_table.py:263)
_TABLE_ALIGNMENT = 128


def step_bounds(
    *,
    max_num_seqs: int,
    max_q_len: int,
    max_model_len: int,
    page_size: int,
    block_size: int,
    num_shards: int = 1,
) -> BatchBounds:
    """The bounds of every step in which each sequence has at most ``max_q_len`` query tokens.

    Padding for captured graphs is within them: a graph has at most ``max_num_seqs`` sequences of ``max_q_len`` tokens (0.21,
    v1/cudagraph_dispatcher.py:210).

    Args:
        max_num_seqs: of the scheduler.
        max_q_len: query tokens up to which a sequence counts as decoding.
        max_model_len: tokens of the longest context.
        page_size: tokens of a page of the cache tensor that the kernel reads.
        block_size: tokens of a block of the engine's manager, a multiple of ``page_size``.
        num_shards: ranks that a sequence's tokens are shared out over.
    """
    tokens = -(-max_model_len // num_shards) + block_size + _TABLE_ALIGNMENT
    return BatchBounds(
        max_num_seqs=max_num_seqs,
        max_pages_per_seq=-(-tokens // page_size),
        max_num_tokens=max_num_seqs * max_q_len,
    )
