"""Every adapter calls its software by the right arguments, and brings back what came by the software's own conventions.

The stand-ins compute from what they are handed, and ``Subject`` holds the answer against the float64 oracle: values, base and
layout of lse, rows without keys, prefix sums, lists of pages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedmla.conformance.adapters import aiter, make_adapter
from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.adapters.vllm_triton import _num_splits
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.examine import examine
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.properties.property import Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Broken, Result, Subject, blind_rows
from pagedmla.contract.target import Target

from .conftest import CPU, STAND_INS, Install, batch_for

RAGGED = ("fa3", "aiter:somebodys")
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "fp16"},
    {"page_size": 1},
    {"page_size": 3},
    {"kv_lora_rank": 256},
    {"q_lens": (2, 2, 2, 2)},
    {"q_lens": (3, 3, 3, 3), "causal": False},
    {"q_lens": (1, 3, 2, 1)},
    {"q_lens": (2, 0, 1, 5), "rows_after": 2},
    {"q_lens": (1, 1, 1, 1), "rows_before": 1},
)


def taken(adapter: Adapter, options: Any, *seq_lens: int) -> list[BatchSpec]:
    specs = [batch_for(adapter, *seq_lens, **fields) for fields in SHAPES]
    return [spec for spec in specs if adapter.refuses(spec, options, CPU) is None]


@pytest.mark.parametrize("name", STAND_INS)
def test_every_batch_that_is_taken_is_right(install: Install, name: str) -> None:
    adapter = install(name)
    subject = Subject(adapter, CPU)
    for options in adapter.options:
        specs = taken(adapter, options, 131, 0, 1, 127)
        assert len(specs) >= 2
        for spec in specs:
            subject.checked(spec, options)
    ragged = [spec for spec in taken(adapter, {}, 131, 0, 1, 127) if spec.ragged]
    assert bool(ragged) == (name in RAGGED or name.startswith("flashinfer"))


@pytest.mark.parametrize("name", STAND_INS)
def test_lse_is_looked_at(install: Install, name: str) -> None:
    adapter = install(name, spoil=0.01)
    subject = Subject(adapter, CPU)
    for options in adapter.options:
        with pytest.raises(Broken, match="lse"):
            subject.checked(batch_for(adapter, 131, 7), options)


@pytest.mark.parametrize("name", [name for name in STAND_INS if name != "vllm_triton"])
def test_the_same_call_without_lse(install: Install, name: str) -> None:
    adapter = install(name)
    subject, spec, options = Subject(adapter, CPU), batch_for(adapter, 131, 7), {"return_lse": False}
    result = subject.checked(spec, options)
    assert result.lse is None
    assert adapter.conventions_for(spec, options, CPU).lse_base is None


@pytest.mark.parametrize("name", STAND_INS)
def test_its_lines_do_the_same(install: Install, name: str) -> None:
    adapter = install(name)
    subject = Subject(adapter, CPU)
    for options in adapter.options:
        for spec in taken(adapter, options, 131, 17, 1, 127):
            names: dict[str, Any] = {"call": subject.build(spec), "torch": torch}
            lines = adapter.lines(options)
            assert "pagedmla" not in lines
            exec(lines, names)
            subject.check(subject.normalise(names["out"], names["lse"], spec, options), spec, options)


@pytest.mark.parametrize("name", ["vllm_triton", "flashinfer_fa2", "flashinfer:somebodys"])
def test_given_outputs_are_written(install: Install, name: str) -> None:
    adapter = install(name)
    assert "out" in adapter.features
    subject, spec = Subject(adapter, CPU), batch_for(adapter, 131, 0, 7)
    call = subject.build(spec)
    out, lse = torch.full((3, 3, 512), math.nan, dtype=torch.bfloat16), torch.full((3, 3), math.nan)
    raw_out, raw_lse = adapter.prepare(call, {}, out, lse).run()
    assert raw_out is out
    assert raw_lse is lse
    subject.check(subject.normalise(out, lse, spec, {}), spec, {})


@pytest.mark.parametrize("name", STAND_INS)
def test_a_prepared_call_follows_its_tensors(install: Install, name: str) -> None:
    """Schedules, plans and lists of pages are made anew by refresh(), at the addresses that a graph would have."""
    adapter = install(name)
    subject = Subject(adapter, CPU)
    for options in adapter.options:
        first = batch_for(adapter, 0, 1, 40, spare_pages=8, spare_columns=9)
        grown = dataclasses.replace(first, seq_lens=(131, 0, 40), seed=5, layout_seed=9)
        columns = 9 - (max(131, 40) - 1) // first.page_size + (40 - 1) // first.page_size
        pages = sum(-(-n // first.page_size) for n in (131, 40)) - sum(
            -(-n // first.page_size) for n in (1, 40)
        )
        grown = dataclasses.replace(grown, spare_columns=columns, spare_pages=8 - pages)
        call, later = subject.build(first), subject.build(grown)
        prepared = adapter.prepare(call, options)
        subject.check(subject.result_of(prepared, call, options), first, options)
        for tensor, content in zip(
            (call.q, call.kv_cache, call.block_table, call.seq_lens),
            (later.q, later.kv_cache, later.block_table, later.seq_lens),
            strict=True,
        ):
            tensor.copy_(content)
        prepared.refresh()
        subject.check(subject.result_of(prepared, later, options), grown, options)


@pytest.mark.parametrize("name", ["flash_mla", "fa3", "vllm_triton", "flashinfer_fa3"])
def test_what_claims_graph_keeps_it(install: Install, name: str) -> None:
    adapter = install(name)
    assert "graph" in adapter.features
    page_size = batch_for(adapter).page_size
    configuration = Configuration("small", {"num_heads": 3, "page_size": page_size}, most_keys=150)
    growth = next(prop for prop in properties_of("GRAPH") if prop.name == "replayed-growth")
    verdict = examine(growth, Subject(adapter, CPU), Scope(adapter, configuration, CPU), max_examples=4)
    assert verdict.status == "passed", verdict


def test_a_schedule_that_is_not_refreshed_shows(install: Install) -> None:
    adapter = install("flash_mla")
    subject, spec = Subject(adapter, CPU), batch_for(adapter, 131, 7)
    call = subject.build(spec)
    prepared = adapter.prepare(call, {})
    call.seq_lens.copy_(torch.tensor([7, 7]))
    assert bool(prepared.run()[0].isnan().all())
    prepared.refresh()
    assert not bool(prepared.run()[0].isnan().any())


def test_flash_mla_gives_its_buffer_back_where_it_may(install: Install) -> None:
    adapter = install("flash_mla")
    call = Subject(adapter, CPU).build(batch_for(adapter, 131, 7))
    prepared = adapter.prepare(call, {})
    assert prepared.run()[0].data_ptr() == prepared.run()[0].data_ptr()
    call = Subject(adapter, CPU).build(batch_for(adapter, 131, 7, q_lens=(2, 2)))
    kept = [adapter.prepare(call, {}).run()[0] for _ in range(2)]
    assert kept[0].data_ptr() != kept[1].data_ptr()


def test_rows_that_nobody_owns_are_held_against_no_one(install: Install) -> None:
    adapter = install("fa3")
    spec = batch_for(adapter, 40, 0, q_lens=(2, 1), rows_after=2)
    result = Subject(adapter, CPU).checked(spec, {})
    assert blind_rows(spec).tolist() == [False, False, True, True, True]
    assert result.lse is not None
    assert result.lse[2:].eq(-math.inf).all()
    # without them, that a row without keys is 0 is a promise
    alone = dataclasses.replace(spec, rows_after=0)
    assert adapter.conventions_for(spec, {}, CPU).empty_out != 0.0
    assert adapter.conventions_for(alone, {}, CPU).empty_out == 0.0
    with pytest.raises(Broken, match="sees no key"):
        Subject(adapter, CPU).normalise(
            torch.ones(3, 3, 512, dtype=alone.q_dtype), torch.zeros(3, 3), alone, {}
        )


def test_vllms_number_of_splits(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = install("vllm_triton")
    splits: list[int] = []
    decode = adapter._decode  # type: ignore[attr-defined]

    @functools.wraps(decode)
    def watched(*arguments: Any, **keywords: Any) -> None:
        splits.append(arguments[8])
        decode(*arguments, **keywords)

    monkeypatch.setattr(adapter, "_decode", watched)
    for options in ({}, {"num_kv_splits": 3}, {"num_kv_splits": 40}):
        Subject(adapter, CPU).checked(batch_for(adapter, 131, 7), options)
    assert splits == [1, 3, 40]
    assert [_num_splits(BatchSpec((n, 3)), CPU) for n in (0, 511, 1023, 1024)] == [1, 1, 1, 2]
    # three times 512 tokens: a power of two, and never past twice the compute units
    assert _num_splits(BatchSpec((3 * 512,)), CPU) == min(4, 2 * torch.get_num_threads())
    assert _num_splits(BatchSpec((2**20,)), CPU) == 2 * torch.get_num_threads()


@pytest.mark.parametrize("name", ["aiter:somebodys", "aiter"])
def test_aiter_is_asked_for_what_the_options_say(install: Install, name: str) -> None:
    adapter = install(name)
    splits = () if name == "aiter" else ({"num_kv_splits": 3},)
    assert adapter.options == ({}, *splits, {"persistent": True})
    module = "aiter.mla" if name == "aiter" else "somebodys"
    calls = sys.modules[module].mla_decode_fwd.__self__.calls
    subject, spec = Subject(adapter, CPU), batch_for(adapter, 131, 7)
    for options in adapter.options:
        subject.checked(spec, options)
    assert calls == [
        {"splits": options.get("num_kv_splits"), "persistent": "persistent" in options, "lse": True}
        for options in adapter.options
    ]


def test_aiter_has_no_lse_where_it_has_no_kernel_with_one(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = install("aiter")
    older = Target("amd", "gfx942", 304, 64 * 1024)
    monkeypatch.setattr(aiter, "Target", SimpleNamespace(detect=lambda device: older))
    subject, spec = Subject(adapter, CPU), batch_for(adapter, 131, 7)
    result: Result = subject.checked(spec, {"persistent": True})
    assert result.lse is None
    assert subject.checked(spec, {}).lse is not None


# torch has the operations of the others, or it has not
@pytest.mark.parametrize("name", [name for name in STAND_INS if name not in ("flash_mla", "fa3")])
def test_what_is_not_loaded_says_so(any_device: None, name: str) -> None:
    adapter = make_adapter(name)
    with pytest.raises(RuntimeError, match="not loaded"):
        adapter.prepare(Subject(adapter, CPU).build(batch_for(adapter, 7)), {})
