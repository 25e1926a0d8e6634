"""An adapter on a device, run and judged: what the properties ask their questions of."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedmla.conformance import numerics
from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared
from pagedmla.conformance.builder import Call, build_spec
from pagedmla.conformance.spec import BatchSpec
from pagedmla.contract.errors import PagedMLAError
from pagedmla.contract.problem import out_dtype_of

_EXPECTED_KEPT = 64


@dataclass(frozen=True)
class Step:
    """One call of a property, for its reproducer.

    Attributes:
        spec: what it was built from.
        options: how the implementation was called.
        note: what was done to the tensors besides, in words; empty: nothing.
    """

    spec: BatchSpec
    options: Options
    note: str = ""


class Broken(Exception):
    """A promise that was not kept.

    Attributes:
        detail: what is wrong, in words, with the place and both values.
        steps: the calls that show it; the last one's result is the wrong one.
    """

    def __init__(self, detail: str, *steps: Step) -> None:
        super().__init__(detail)
        self.detail = detail
        self.steps = steps


class Refused(Exception):
    """The implementation says that it does not take a batch; nothing is held against it."""


@dataclass(frozen=True)
class Result:
    """An answer in the contract's conventions: natural log; rows that see no key have lse -inf.

    Attributes:
        out: [T, H, kv_lora_rank].
        lse: f32 [T, H], or None when the implementation returns none.
    """

    out: Tensor
    lse: Tensor | None

    def rows(self, rows: slice | Tensor) -> Result:
        """Some query rows."""
        return Result(self.out[rows], None if self.lse is None else self.lse[rows])


class Subject:
    """An adapter on a device.

    Attributes:
        adapter: what is examined; loaded.
        device: where its tensors live.
    """

    def __init__(self, adapter: Adapter, device: torch.device) -> None:
        self.adapter = adapter
        self.device = device
        self._expected: dict[tuple[BatchSpec, torch.dtype, bool], numerics.Expected] = {}

    def require(self, spec: BatchSpec, options: Options) -> None:
        """Ends the example when the implementation does not take ``spec``.

        Raises:
            Refused: with its reason.
        """
        has_columns = any(spec.seq_lens) or spec.spare_columns > 0
        if spec.seq_lens and not has_columns and "bounded" not in self.adapter.features:
            # even kernels that read no key of an empty sequence look at its first cell
            raise Refused("a table without columns is asked of implementations that claim 'bounded'")
        reason = self.adapter.refuses(spec, options, self.device)
        if reason is not None:
            raise Refused(reason)

    def conventions(self, spec: BatchSpec, options: Options) -> Conventions:
        """How the implementation answers; it is asked only for what it takes.

        Raises:
            Refused: with its reason.
        """
        reason = self.adapter.refuses(spec, options, self.device)
        if reason is not None:
            raise Refused(reason)
        return self.adapter.conventions_for(spec, options, self.device)

    def build(self, spec: BatchSpec) -> Call:
        """The tensors of ``spec`` on the subject's device."""
        return build_spec(spec, self.device)

    def run(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Result:
        """Calls the implementation once; what it leaves unwritten of its own outputs is nan.

        Args:
            call: may be a changed one; ``call.spec`` says which rows see no key.
            options: how to call.
            out, lse: where to write, for adapters with the feature "out".

        Raises:
            Broken: it raised an error, or its result has a wrong shape or dtype.
            Refused: it does not take ``call.spec``.
        """
        self.require(call.spec, options)
        step = Step(call.spec, options)
        with unwritten_memory_is_nan(), raised_errors_are_broken(step):
            prepared = self.adapter.prepare(call, options, out, lse)
            return self.result_of(prepared, call, options)

    def result_of(self, prepared: Prepared, call: Call, options: Options) -> Result:
        """Runs a prepared call, and brings its answer into the contract's conventions."""
        raw_out, raw_lse = prepared.run()
        return self.normalise(raw_out, raw_lse, call.spec, options)

    def normalise(self, out: Tensor, lse: Tensor | None, spec: BatchSpec, options: Options) -> Result:
        """The contract's form of an answer by the implementation's conventions.

        Raises:
            Broken: a wrong shape or dtype, or rows without keys that are not what the conventions say.
            Refused: it does not take ``spec``.
        """
        step = Step(spec, options)
        conventions = self.conventions(spec, options)
        if conventions.lse_base is None:
            lse = None
        tokens = spec.starts[-1] + spec.rows_after
        wanted = (tokens, spec.num_heads, spec.kv_lora_rank)
        if tuple(out.shape) != wanted:
            raise Broken(f"out has shape {tuple(out.shape)} where {wanted} is right", step)
        out_dtype = conventions.out_dtype or out_dtype_of(spec.q_dtype)
        if out.dtype != out_dtype:
            raise Broken(f"out has dtype {out.dtype} where {out_dtype} is right", step)
        if conventions.lse_base is not None and lse is None:
            raise Broken("no lse came back", step)
        if lse is not None:
            if tuple(lse.shape) != wanted[:2]:
                raise Broken(f"lse has shape {tuple(lse.shape)} where {wanted[:2]} is right", step)
            if lse.dtype != conventions.lse_dtype:
                raise Broken(f"lse has dtype {lse.dtype} where {conventions.lse_dtype} is right", step)
        dead = blind_rows(spec).to(out.device)
        if bool(dead.any()):
            _check_dead_rows(out[dead], None if lse is None else lse[dead], conventions.empty_out,
                             conventions.empty_lse, step)  # fmt: skip
            out = torch.where(dead[:, None, None], torch.zeros_like(out), out)
        if lse is not None and conventions.lse_base is not None:
            if conventions.lse_base != math.e:
                lse = lse.float() * math.log(conventions.lse_base)
            lse = torch.where(dead[:, None], torch.full_like(lse, -math.inf), lse).float()
        return Result(out, lse)

    def check(self, result: Result, spec: BatchSpec, options: Options, note: str = "") -> None:
        """Holds ``result`` against the float64 oracle of ``spec``, with the derived bound.

        Raises:
            Broken: with the worst place.
        """
        detail = self.difference(result, self.expected(spec, options), spec, options)
        if detail:
            raise Broken(detail, Step(spec, options, note))

    def difference(
        self, result: Result, expected: numerics.Expected, spec: BatchSpec, options: Options
    ) -> str:
        """Where ``result`` is not ``expected``, in words, by the conventions for a call of ``spec``; empty when it is."""
        conventions = self.conventions(spec, options)
        lse = result.lse if result.lse is not None else expected.lse.float()
        rounding, limit = conventions.lse_rounding, conventions.lse_limit
        return numerics.compare(result.out, lse, expected, lse_rounding=rounding, lse_limit=limit).detail

    def checked(self, spec: BatchSpec, options: Options) -> Result:
        """Builds, runs and checks ``spec``."""
        result = self.run(self.build(spec), options)
        self.check(result, spec, options)
        return result

    def expected(self, spec: BatchSpec, options: Options) -> numerics.Expected:
        """The oracle's answer, bound by how ``options`` lead to rounding.

        It does not depend on the layout, so layouts of one batch share it.
        """
        conventions = self.conventions(spec, options)
        key = (
            replace(spec, layout_seed=0, poison="nan", page_size=64, spare_pages=0, spare_columns=0),
            conventions.p_dtype or spec.q_dtype,
            conventions.lse_of_rounded_weights,
        )
        if key not in self._expected:
            if len(self._expected) >= _EXPECTED_KEPT:
                self._expected.clear()
            call = build_spec(key[0])
            out_dtype = out_dtype_of(spec.q_dtype)
            self._expected[key] = numerics.expect(
                call.q, call.kv_cache, call.block_table, call.seq_lens,
                out_dtype=out_dtype, p_dtype=key[1], lse_of_rounded_weights=key[2],
                **call.semantics(),  # type: ignore[arg-type]
            )  # fmt: skip
        return self._expected[key]


def blind_rows(spec: BatchSpec) -> Tensor:
    """bool [T]: query rows that see no key, and those of no sequence."""
    starts = spec.starts
    blind = torch.ones(starts[-1] + spec.rows_after, dtype=torch.bool)
    for start, length, q_len in zip(starts[:-1], spec.seq_lens, spec.query_counts, strict=True):
        hidden = q_len if length == 0 else max(0, q_len - length) if spec.causal else 0
        blind[start + hidden : start + q_len] = False
    return blind


def first_difference(one: Result, two: Result) -> str:
    """Where two results differ in a bit, with both values; empty when they do not."""
    pairs = [("out", one.out, two.out)]
    if one.lse is not None and two.lse is not None:
        pairs.append(("lse", one.lse, two.lse))
    for name, a, b in pairs:
        bits = torch.int16 if a.dtype.itemsize == 2 else torch.int32
        different = a.contiguous().view(bits) != b.contiguous().view(bits)
        if bool(different.any()):
            index = tuple(different.nonzero()[0].tolist())
            return (
                f"{name}{list(index)} is {a[index].item():.9g} in one and {b[index].item():.9g} in the other"
            )
    return ""


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """In here torch.empty is full of nan, so that a result that nobody wrote cannot pass for a right one."""
    before = torch.get_deterministic_debug_mode()
    # a property of a module, which type checkers do not see
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # use_deterministic_algorithms does the same, and imports the compiler for seconds
        torch.set_deterministic_debug_mode("warn")
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            deterministic.fill_uninitialized_memory = fill


@contextmanager
def raised_errors_are_broken(step: Step) -> Iterator[None]:
    """An accepted batch that makes the implementation raise is a broken promise, unless it says that it is not built."""
    try:
        yield
    except (Broken, Refused):
        raise
    except Exception as error:
        if isinstance(error, NotImplementedError) and not isinstance(error, PagedMLAError):
            # a refusal; our own decode has a table to say so beforehand
            raise Refused(str(error)) from error
        raise Broken(f"raised {type(error).__name__}: {error}", step) from error


def _check_dead_rows(out: Tensor, lse: Tensor | None, empty_out: float, empty_lse: float, step: Step) -> None:
    if not math.isnan(empty_out) and not bool((out == empty_out).all()):
        wrong = out[out != empty_out][0].item()
        raise Broken(f"out of a row that sees no key is {wrong:.9g} where {empty_out} is right", step)
    if lse is not None and not math.isnan(empty_lse) and not bool((lse == empty_lse).all()):
        wrong = lse[lse != empty_lse][0].item()
        raise Broken(f"lse of a row that sees no key is {wrong:.9g} where {empty_lse} is right", step)
