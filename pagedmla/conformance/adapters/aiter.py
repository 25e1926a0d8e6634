"""AMD's AITER, ``mla_decode_fwd``, and any module with functions of its names and arguments.

Conventions, read in AITER of August 2026 (ROCm/aiter: aiter/mla.py, aiter/ops/attention.py, csrc/kernels/mla/reduce.cu) and not
run, since no card that it has kernels for was at hand:

- q [T, H, 576] and o [T, H, 512] bf16, kv_buffer [pages, page_size, 1, 576], pages as CSR lists; one query length a batch.
- Where its tables have no kernel it aborts the process: ``_HEADS`` is what dispatches, by architecture and mode.
- final lse f32 [T, H], natural; where the persistent mode has no kernel with lse (gfx942, bf16) none is asked for.
- Of rows that see no key nothing is promised: its reducers leave 0 or nan, with +inf or -inf.
- Its fp8 kernels, whose numbers are e4m3fnuz on gfx942 and e4m3fn on gfx950, are left out.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pagedmla.conformance.adapters import limits
from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.answers import answer, wants_lse
from pagedmla.conformance.adapters.layouts import PageLists, query_starts
from pagedmla.conformance.adapters.modules import OUR_MODULES, our_p_dtype, our_refusal, refusing
from pagedmla.conformance.adapters.software import PEER_ERRORS, first_line, import_software, version_of
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec
from pagedmla.contract.problem import out_dtype_of
from pagedmla.contract.target import Target

_PACKAGE = "aiter"
_DECODE, _SIZES, _SCHEDULE = "mla_decode_fwd", "get_mla_metadata_info_v1", "get_mla_metadata_v1"

_ANY = (1, 17)
_BY_16 = dict.fromkeys(range(32, 129, 16), (1, 4))
_HEADS: dict[tuple[str, bool], dict[int, tuple[int, int]]] = {
    ("gfx942", False): {8: (1, 1), 16: _ANY, 32: _ANY, 64: (2, 17), 128: _ANY},
    ("gfx942", True): {8: (2, 2), 16: (1, 4), **_BY_16},
    ("gfx950", False): {8: (1, 2), 16: _ANY, 32: _ANY, 64: _ANY, 128: _ANY},
    ("gfx950", True): {8: (8, 17), **dict.fromkeys((16, 24, 32, 48, 64, 80, 96, 112, 128), _ANY)},
}
"""(architecture, persistent) -> heads -> least and most query tokens of a sequence, for bf16 queries and cache."""

# the order in which get_mla_metadata_info_v1 describes the six buffers; get_mla_metadata_v1 takes the third before the second
_BUFFERS = (
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


class Aiter(Adapter):
    """``mla_decode_fwd`` without a schedule, and with one where the module can make it (option ``persistent``)."""

    conventions = Conventions(empty_lse=math.nan, empty_out=math.nan)

    def __init__(self, module: str = _PACKAGE) -> None:
        package = module.split(".")[0]
        self.name = _PACKAGE if module == _PACKAGE else f"{_PACKAGE}:{module}"
        self.version = ""
        self._module_name = module
        self._ours, self._theirs = package in OUR_MODULES, package == _PACKAGE
        # of others nobody has said that a captured call stays right
        self.features = frozenset({"graph"}) if self._ours else frozenset()
        self.options: tuple[Options, ...] = ({},)
        self._functions: dict[str, Callable[..., Any]] = {}

    def load(self, folder: Path | None = None) -> str | None:
        """Imports the module; the functions may be in its ``mla``, where AITER has one of them."""
        found = import_software(self._module_name, folder)
        if isinstance(found, str):
            return found
        self.version = version_of(self._module_name)
        try:
            self._functions = _functions(found, self._module_name)
        except PEER_ERRORS as error:
            return f"{self._module_name} does not load: {first_line(error)}"
        if _DECODE not in self._functions:
            return f"{self._module_name} has no {_DECODE}"
        ways: list[Options] = [{}]
        if not self._theirs:
            # AITER calls its own number of splits "for experts only"
            ways.append({"num_kv_splits": 3})
        if _SIZES in self._functions and _SCHEDULE in self._functions:
            ways.append({"persistent": True})
        self.options = tuple(ways)
        return None

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """AITER: what it has no kernel for.  Ours: what the support table says.  Others: nothing but empty batches."""
        if self._theirs:
            return _aiter_refuses(spec, bool(options.get("persistent")), device)
        return limits.no_queries(spec) or (our_refusal(spec, device) if self._ours else None)

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        """Ours says what a row without keys is, rows of no request included."""
        if self._ours:
            ours = Conventions(p_dtype=our_p_dtype(spec, device))
            return ours if wants_lse(options) else replace(ours, lse_base=None)
        if not self._with_lse(options, device):
            options = {**options, "return_lse": False}
        return answer(self.conventions, spec, options)

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """Lists of pages and the schedule are made here and in ``refresh``.

        Args:
            options: ``num_kv_splits``; ``persistent``, with a schedule; ``return_lse=False``.
            call, out, lse: see ``Adapter``.
        """
        if not self._functions:
            raise RuntimeError(f"{self.name} is not loaded")
        decode, rows = self._functions[_DECODE], call.q.shape[:2]
        if out is None:
            out = torch.empty(
                *rows, call.kv_lora_rank, dtype=out_dtype_of(call.q.dtype), device=call.q.device
            )
        pages, starts = PageLists(call), query_starts(call)
        schedule = _Schedule(self._functions, call, pages, starts) if options.get("persistent") else None
        arguments = (
            call.q,
            call.kv_cache.unsqueeze(2),  # one KV head
            out,
            starts,
            pages.kv_indptr,
            pages.kv_indices,
            pages.kv_last_page_len,
            max(1, *call.spec.query_counts),
            call.page_size,
            1,  # KV heads
            call.softmax_scale,
        )
        keywords: dict[str, Any] = {
            "return_lse": self._with_lse(options, call.q.device),
            "causal": call.causal,
            **_scales(call),
            **(schedule.buffers if schedule is not None else {}),
        }
        if "num_kv_splits" in options:
            keywords["num_kv_splits"] = options["num_kv_splits"]

        def run() -> tuple[Tensor, Tensor | None]:
            found = decode(*arguments, **keywords)
            return out, found[1] if keywords["return_lse"] else None

        def refresh() -> None:
            pages.refresh()
            if schedule is not None:
                schedule.make()

        return PreparedCall(run if self._theirs else refusing(run), refresh)

    def lines(self, options: Options) -> str:
        """Without a schedule; with one the reproducer says so."""
        place = f"{_PACKAGE}.mla" if self._module_name == _PACKAGE else self._module_name
        splits = f"num_kv_splits={options['num_kv_splits']!r}, " if "num_kv_splits" in options else ""
        with_schedule = (
            "" if not options.get("persistent") else f"\n# found with the six buffers of {_SCHEDULE}"
        )
        return f"""\
from {place} import {_DECODE}
device, lens, size = call.q.device, call.seq_lens, call.page_size
count, pages = len(lens), (lens + size - 1) // size
starts, page_starts = call.cu_seqlens_q, torch.zeros(count + 1, dtype=torch.int32, device=device)
if starts is None:
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * (len(call.q) // count)
page_starts[1:] = pages.cumsum(0)
indices = torch.cat([row[:live] for row, live in zip(call.block_table, pages.tolist())])
last = torch.where(lens > 0, lens - (pages - 1) * size, size)
q_scale, kv_scale = (None if x is None else torch.tensor([x], device=device) for x in (call.q_scale, call.kv_scale))
out_dtype = call.q.dtype if q_scale is None else torch.bfloat16
out = torch.empty(*call.q.shape[:2], call.kv_lora_rank, dtype=out_dtype, device=device)
_, lse = {_DECODE}(
    call.q, call.kv_cache.unsqueeze(2), out, starts, page_starts, indices, last, int(starts.diff().max()), size, 1,
    call.softmax_scale, {splits}q_scale=q_scale, kv_scale=kv_scale, return_lse=True, causal=call.causal,
){with_schedule}"""

    def _with_lse(self, options: Options, device: torch.device) -> bool:
        without = self._theirs and options.get("persistent") and Target.detect(device).arch == "gfx942"
        return wants_lse(options) and not without


class _Schedule:
    """The six buffers of the persistent mode, at fixed addresses."""

    def __init__(
        self, functions: dict[str, Callable[..., Any]], call: Call, pages: PageLists, starts: Tensor
    ) -> None:
        self._fill, self._call, self._pages, self._starts = functions[_SCHEDULE], call, pages, starts
        self._most = max(1, *call.spec.query_counts)
        sizes = functions[_SIZES](
            call.seq_lens.shape[0],
            self._most,
            call.q.shape[1],
            call.q.dtype,
            call.kv_cache.dtype,
            is_sparse=False,
        )
        self.buffers = {
            name: torch.empty(shape, dtype=dtype, device=call.q.device)
            for name, (shape, dtype) in zip(_BUFFERS, sizes, strict=True)
        }
        self.make()

    def make(self) -> None:
        """For what the lists of pages hold now."""
        call, pages, of = self._call, self._pages, self.buffers
        self._fill(
            self._starts,
            pages.kv_indptr,
            pages.kv_last_page_len,
            call.q.shape[1],
            1,  # KV heads
            call.causal,
            of["work_meta_data"],
            of["work_info_set"],
            of["work_indptr"],
            of["reduce_indptr"],
            of["reduce_final_map"],
            of["reduce_partial_map"],
            page_size=call.page_size,
            kv_granularity=max(call.page_size, 16),
            max_seqlen_qo=self._most,
            uni_seqlen_qo=-1 if call.spec.ragged else self._most,
            fast_mode=True,
            dtype_q=call.q.dtype,
            dtype_kv=call.kv_cache.dtype,
        )


def _functions(module: ModuleType, name: str) -> dict[str, Callable[..., Any]]:
    places = [module]
    if not hasattr(module, _DECODE):
        try:
            places.append(importlib.import_module(f"{name}.mla"))
        except ModuleNotFoundError as error:
            if error.name != f"{name}.mla":
                raise
    found = {}
    for function in (_DECODE, _SIZES, _SCHEDULE):
        for place in places:
            if hasattr(place, function):
                found[function] = getattr(place, function)
    return found


def _scales(call: Call) -> dict[str, Tensor]:
    """Per-tensor scales as AITER takes them: f32 of one element."""
    scales = {"q_scale": call.q_scale, "kv_scale": call.kv_scale}
    return {
        name: torch.tensor([scale], dtype=torch.float32, device=call.q.device)
        for name, scale in scales.items()
        if scale is not None
    }


def _aiter_refuses(spec: BatchSpec, persistent: bool, device: torch.device) -> str | None:
    cannot = (
        limits.no_queries(spec)
        or limits.uneven_queries(spec)
        or limits.other_dims(spec, ((512, 64),))
        or limits.other_dtypes(spec, (torch.bfloat16,))
        or limits.not_arch(device, "gfx942", "gfx950")
    )
    if cannot is not None:
        return cannot
    if spec.page_size & (spec.page_size - 1):
        return f"takes pages of a power of two tokens, not {spec.page_size}"
    arch, q_len = Target.detect(device).arch, spec.query_counts[0]
    table = _HEADS[arch, persistent]
    least, most = table.get(spec.num_heads, (1, 0))
    if not least <= q_len <= most:
        mode = "with a schedule" if persistent else "without a schedule"
        return f"has no kernel {mode} for {spec.num_heads} heads and {q_len} query tokens on {arch}"
    if not spec.causal and q_len > 1 and (arch, persistent) != ("gfx950", True):
        return "masks causally where a sequence has several query tokens"
    return None
