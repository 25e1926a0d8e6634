"""AITER's MLA decode calls over ours: ``mla_decode_fwd``, the metadata of its persistent mode, ``mla_reduce_v1``.

Names, order and defaults of the arguments are those of AITER's ``aiter/mla.py`` and ``aiter/ops/attention.py`` of August 2026.
``mla`` is a module here as there, so ``from pagedmla.compat import aiter`` and ``from pagedmla.compat.aiter.mla import
mla_decode_fwd`` both take the place of AITER's import.  What is asked for with AITER's arguments runs on whatever device the
tensors are on, by the backend that ``pagedmla.decode`` chooses, and gives ``pagedmla.decode``'s bits.

**Results, always.**  ``mla_decode_fwd`` returns ``(o, lse)``: the caller's own ``o``, written in place and never re-pointed,
and lse f32 [total_q, nhead], natural logarithm, or None unless ``return_lse``.  A row that sees no key has out 0, lse -inf.

| AITER | here |
|---|---|
| aborts the process where it has no kernel for heads, query length and dtype | any number of both; else ``Unsupported`` |
| first result: partial sums f32 [total_q, splits, nhead, 512], or [rows, 1, nhead', 512], or an alias of ``o`` | ``o`` |
| lse unwritten with one split; an unmerged lse instead of None; folded to 16 heads | written in every mode, [total_q, nhead] |
| empty rows: lse +inf or -inf, out 0 or NaN | out 0, lse -inf |
| ``o`` re-pointed to other memory where heads are folded | written in place |
| kv_last_page_lens looked at by some kernels, for some page sizes | by all, for all; bounded to 1..page_size |
| persistent mode right only where every last page is full | right for every length |
| schedule says nothing of a last page that is not full | field 6 of a work is negative by what is missing there |
| mode, split count and mask depend on environment variables and hash order | on the arguments |
| kv_scale left out under a bf16 q: a null pointer is followed | ``InvalidArgument`` |
| metadata of a wrong size is written past its end | ``InvalidArgument``, ``PlanMismatch`` |

**A trap that is kept**: ``sm_scale=None`` is 1 / sqrt(576).  No model's scale is that: it comes from the head size before
absorption (192 in DeepSeek-V3).  A drop-in must give the same numbers, so the default stands; give the model's scale.
"""

from pagedmla.compat.aiter.metadata import get_mla_metadata_info_v1, get_mla_metadata_v1
from pagedmla.compat.aiter.mla import mla_decode_fwd
from pagedmla.compat.aiter.reduce import mla_reduce_v1

__all__ = ["get_mla_metadata_info_v1", "get_mla_metadata_v1", "mla_decode_fwd", "mla_reduce_v1"]
