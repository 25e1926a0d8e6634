"""FlashInfer's ``BatchMLAPagedAttentionWrapper`` over ``pagedmla.decode``.

Signatures: flashinfer-python 0.6.8, flashinfer/mla/_core.py, with the fp8 scales that later releases added to ``run``.  0.7.4
takes the same calls and calls them its flat, legacy form; its ``metadata``, ``query`` and ``kv_cache`` arguments are not here.
FlashInfer is not needed.

What differs from FlashInfer:

- Any device that a backend takes; float32 too.  ``backend`` "auto", "fa2" and "fa3" all mean our own choice.
- Every row of ``out`` and ``lse`` is written, rows that no sequence owns too.
- With ``use_cuda_graph`` the first ``plan`` fixes everything but the batch, since a captured graph has it inside; a later one
  that differs is a PlanMismatch, where FlashInfer would replay what was captured.
- Refused by name: the profiler, fp8 queries and outputs, fp8 scales that differ between latent and rope or along tokens, and
  backends with a call of their own ("cutlass" with ``kv_len`` and ``page_table``).

The same as FlashInfer: ``lse`` is base 2 unless ``return_lse_base_on_e``; a row that sees no key has out 0 and, in either base,
lse -inf; the causal mask is aligned at the bottom right.

Two cache tensors are one row here.  Where ``ckv_cache`` and ``kpe_cache`` are neighbouring columns of one cache, as in engines,
that cache is read in place.  Tensors that lie apart cost a copy in every ``run``: the pages that the plan names, never the
pool, are packed into a temporary of [pages, page_size, head_dim_ckv + head_dim_kpe].  A captured graph cannot do that for
batches to come, so with ``use_cuda_graph`` it is Unsupported.
"""

from pagedmla.compat.flashinfer.wrapper import BatchMLAPagedAttentionWrapper

__all__ = ["BatchMLAPagedAttentionWrapper"]
