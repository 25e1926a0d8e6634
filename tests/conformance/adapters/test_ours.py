"""Our own adapter: with out and lse given it also brings the workspace, and "no_sync" is claimed where it is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import pagedmla
from pagedmla.conformance.adapters.ours import ALL_FEATURES, Ours, workspace_for
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Subject
from pagedmla.contract.errors import PagedMLAError

CPU = torch.device("cpu")
SPECS = (
    BatchSpec((131, 0, 7), num_heads=3, page_size=16),
    BatchSpec((40, 7), q_lens=(2, 2), num_heads=3, page_size=3, causal=False, kv_lora_rank=256),
    BatchSpec((40, 0, 7), q_lens=(2, 0, 3), num_heads=3, rows_before=1, rows_after=2),
    BatchSpec((40, 7), num_heads=3, kv_dtype="e4m3fn"),
)


def outputs(spec: BatchSpec) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (spec.starts[-1] + spec.rows_after, spec.num_heads)
    return torch.full((*rows, spec.kv_lora_rank), torch.nan, dtype=torch.bfloat16), torch.full(
        rows, torch.nan
    )


def test_kernel_backends_claim_no_sync_and_torch_does_not() -> None:
    assert "no_sync" in Ours("triton").features & Ours("gluon").features
    assert Ours().features == ALL_FEATURES
    assert "no_sync" not in ALL_FEATURES | Ours("torch").features


def test_a_named_backend_is_one_kernel_and_the_automatic_choice_is_not() -> None:
    """What the copy engine cannot read goes to another backend, with other bits, unless a backend is named."""
    assert "one_kernel" not in Ours().features
    for backend in ("gluon", "triton", "torch"):
        assert Ours(backend).features == Ours(backend).features | ALL_FEATURES | {"one_kernel"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: str(spec)[:40])
def test_one_workspace_for_all_runs_where_outputs_are_given(
    spec: BatchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    decode = pagedmla.decode

    def watched(*arguments: Any, **keywords: Any) -> Any:
        given.append(keywords.get("workspace"))
        return decode(*arguments, **keywords)

    monkeypatch.setattr(pagedmla, "decode", watched)
    ours = Ours("torch")
    subject = Subject(ours, CPU)
    for options in ours.options:
        given.clear()
        call, (out, lse) = subject.build(spec), outputs(spec)
        prepared = ours.prepare(call, options, out, lse)
        for _ in range(2):
            out.fill_(torch.nan)
            subject.check(subject.result_of(prepared, call, options), spec, options)
        assert given[0] is given[1]
        assert given[0].dtype == torch.uint8
        subject.check(subject.run(call, options), spec, options)
        assert given[2] is None


def test_the_workspace_is_for_the_tensors_not_for_what_they_were_built_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    size = pagedmla.workspace_size

    def watched(problem: Any, bounds: Any, *rest: Any) -> int:
        asked.append((problem, bounds))
        return size(problem, bounds, *rest)

    monkeypatch.setattr(pagedmla, "workspace_size", watched)
    call = Subject(Ours("torch"), CPU).build(SPECS[2])
    workspace_for(call, {"num_kv_splits": 3}, "torch")
    problem, bounds = asked[-1]
    # as decode sees it: of ragged queries one sequence may have all
    assert (problem.max_q_len, problem.num_kv_splits, problem.page_size) == (8, 3, 64)
    assert (bounds.max_num_seqs, bounds.max_pages_per_seq, bounds.max_num_tokens) == (3, 3, 8)
    pair = dataclasses.replace(call, q=(call.q_latent, call.q_rope))  # type: ignore[arg-type]
    workspace_for(pair, {}, "torch")
    assert asked[-1][0].qk_rope_head_dim == 64
    narrow = dataclasses.replace(
        call, q=call.q[..., :512], kv_cache=call.kv_cache[..., :512], cu_seqlens_q=None
    )
    workspace_for(dataclasses.replace(narrow, q=narrow.q[:6]), {}, "torch")
    assert (asked[-1][0].qk_rope_head_dim, asked[-1][0].max_q_len) == (0, 2)


def test_a_call_that_is_refused_is_refused_before_it_runs() -> None:
    call, (out, lse) = Subject(Ours("torch"), CPU).build(SPECS[0]), outputs(SPECS[0])
    with pytest.raises(PagedMLAError):
        Ours("torch").prepare(call, {"schedule": "persistent"}, out, lse)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("backend", ["torch", None])
def test_its_lines_do_the_same(backend: str | None) -> None:
    ours = Ours(backend)
    subject = Subject(ours, CPU)
    for spec in SPECS:
        for options in ours.options:
            names: dict[str, Any] = {"call": subject.build(spec)}
            exec(ours.lines(options), names)
            subject.check(subject.normalise(names["out"], names["lse"], spec, options), spec, options)
