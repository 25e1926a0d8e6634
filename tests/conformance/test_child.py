"""What happens inside a child process, here in this one: each status of a finding, and what the parent is told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pagedmla.conformance import asking, child
from pagedmla.conformance.adapters.adapter import Adapter, Options
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.asking import WatchedSubject, ask, lost_context
from pagedmla.conformance.child import Job, load_adapter
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.findings import Finding
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.reproducer import ShownCall
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import specs
from pagedmla.conformance.subject import Broken, Refused, Step, Subject
from pagedmla.contract.errors import InvalidArgument, Unsupported

CPU = torch.device("cpu")
SMALL = Configuration(
    "small", {"num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "page_size": 16}, most_keys=40
)


def batches(scope: Scope) -> st.SearchStrategy[BatchSpec]:
    return specs(scope.configuration)


def prop(test: Callable[[Subject, BatchSpec], object], **fields: Any) -> Property:
    return Property("PAGE", "planted", "something", batches, test, **fields)  # type: ignore[arg-type]


def asked(planted: Property, adapter: Adapter | None = None, **options: Any) -> Finding:
    subject = WatchedSubject(adapter or Ours("torch"), CPU)
    return ask(planted, subject, SMALL, **{"examples": 5, "seed": 0} | options)


def right(subject: Subject, spec: BatchSpec) -> None:
    subject.checked(spec, {})


def test_a_kept_promise_passes() -> None:
    finding = asked(prop(right))
    assert (finding.status, finding.examples, finding.detail) == ("passed", 5, "")
    assert (finding.kind, finding.property, finding.configuration) == ("PAGE", "planted", "small")
    assert finding.reproducer == ""


def test_a_broken_one_fails_with_what_shows_it() -> None:
    def longer_than_fourteen(subject: Subject, spec: BatchSpec) -> None:
        subject.checked(spec, {})
        if max(spec.seq_lens) > 14:
            raise Broken("out[0, 0, 0] is wrong", Step(spec, {}))

    finding = asked(prop(longer_than_fourteen), examples=30)
    assert (finding.status, finding.detail) == ("failed", "out[0, 0, 0] is wrong")
    assert "seq_lens=(15,)" in finding.example  # made smaller
    assert "call = build(seq_lens=(15,)" in finding.reproducer


def test_a_refusal_is_not_held_against_anyone() -> None:
    drawn: list[BatchSpec] = []

    def refused(subject: Subject, spec: BatchSpec) -> None:
        drawn.append(spec)
        raise Refused("only even pages")

    finding = asked(prop(refused))
    assert (finding.status, finding.examples, finding.detail) == ("refused", 0, "only even pages")
    assert not finding.bad
    assert finding.reproducer == ""
    assert len(drawn) == 100


def test_refusals_among_others_are_passed_over() -> None:
    def small_ones(subject: Subject, spec: BatchSpec) -> None:
        if max(spec.seq_lens) > 17:
            raise Refused("too long")
        subject.checked(spec, {})

    finding = asked(prop(small_ones), examples=40)
    assert (finding.status, finding.detail) == ("passed", "")
    assert finding.examples >= 10


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"needs": frozenset({"no_sync"})}, "does not claim no_sync"),
        ({"device_types": frozenset({"cuda"})}, "is asked on cuda only"),
    ],
)
def test_what_does_not_apply_is_not_asked(fields: dict[str, Any], detail: str) -> None:
    adapter = Ours("torch")
    adapter.features = adapter.features - {"no_sync"}
    planted = prop(lambda subject, spec: pytest.fail("was asked"), **fields)
    finding = asked(planted, adapter)
    assert (finding.status, finding.examples, finding.detail) == ("not applied", 0, detail)


def test_a_check_that_raises_says_so_itself() -> None:
    def faulty(subject: Subject, spec: BatchSpec) -> None:
        raise KeyError("mistake of ours")

    finding = asked(prop(faulty))
    assert finding.status == "died"
    assert finding.detail.startswith("the check itself raised KeyError: 'mistake of ours'")
    assert "test_child.py" in finding.detail
    assert "BatchSpec" in finding.example


def test_leaving_python_is_a_broken_promise() -> None:
    class Leaving(Ours):
        def prepare(self, *arguments: Any) -> Any:
            raise SystemExit("no GPU")

    finding = asked(prop(right), Leaving("torch"))
    assert (finding.status, finding.detail) == ("failed", "raised SystemExit: no GPU")
    assert "call = build(" in finding.reproducer


def test_past_its_time_a_property_begins_no_new_example() -> None:
    begun: list[int] = []
    finding = asked(prop(right), seconds=0.0, examples=50, begin=lambda done, example: begun.append(done))
    assert begun == [0]
    assert (finding.status, finding.examples) == ("passed", 1)
    assert finding.detail == "stopped after 1 examples: its time was over"


def test_each_example_is_told_before_it_runs() -> None:
    told: list[tuple[int, str]] = []
    ran: list[str] = []

    def test(subject: Subject, spec: BatchSpec) -> None:
        assert told[-1] == (len(ran), repr(spec))
        ran.append(repr(spec))

    assert asked(prop(test), begin=lambda *what: told.append(what)).status == "passed"
    assert len(ran) == len(told) == 5


def test_a_lost_context_is_found_in_the_example_that_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BatchSpec] = []

    def test(subject: Subject, spec: BatchSpec) -> None:
        subject.checked(spec, {})
        seen.append(spec)

    lost = "CUDA error: an illegal memory access was encountered"
    monkeypatch.setattr(asking, "lost_context", lambda device: lost if len(seen) == 3 else "")
    finding = asked(prop(test), examples=20)
    # no example is drawn after it, to make it smaller or otherwise
    assert len(seen) == 3
    assert (finding.status, finding.examples) == ("died", 2)
    assert finding.detail == f"the device's context is lost: {lost}"
    assert finding.example == repr(seen[-1])
    assert f"build({seen[-1]}, device='cpu')" in finding.reproducer


def test_a_cpu_has_no_context_to_lose() -> None:
    assert lost_context(CPU) == ""


def test_a_watched_subject_tells_of_each_call() -> None:
    told: list[ShownCall] = []
    subject = WatchedSubject(Ours("torch"), CPU, told.append)
    spec, options = SMALL.spec((5, 3)), {"num_kv_splits": 2}
    subject.checked(spec, options)
    assert [call.spec for call in told] == [spec]
    assert "num_kv_splits=2" in told[0].lines
    assert subject.last == Step(spec, options)


def test_a_refused_call_is_not_told() -> None:
    class Refusing(Ours):
        def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str:
            return "not that"

    subject = WatchedSubject(Refusing("torch"), CPU, lambda call: pytest.fail("was told"))
    with pytest.raises(Refused):
        subject.checked(SMALL.spec((5,)), {})


class Pipe:
    """The child's end: gives it jobs, keeps what it says."""

    def __init__(self, *jobs: Job) -> None:
        self.jobs, self.said = deque(jobs), list[tuple[str, Any]]()

    def recv(self) -> Job:
        if not self.jobs:
            raise EOFError
        return self.jobs.popleft()

    def send(self, message: tuple[str, Any]) -> None:
        self.said.append(message)


def job(first: int = 0) -> Job:
    return Job("PAGE", SMALL, first, examples=1, seed=0, time_limit_s=60)


def test_jobs_are_done_from_their_first_property_on() -> None:
    pipe = Pipe(job(), job(first=2))
    child._do_jobs(pipe, Ours("torch"), CPU)  # type: ignore[arg-type]
    count = len(properties_of("PAGE"))
    indices = [value for word, value in pipe.said if word == "asked"]
    assert indices == [*range(count), *range(2, count)]
    findings = [value for word, value in pipe.said if word == "finding"]
    assert [index for index, _ in findings] == indices
    assert {finding.status for _, finding in findings} == {"passed"}
    assert [word for word, _ in pipe.said].count("done") == 2
    # of an example the parent hears before it hears of its calls
    words = [word for word, _ in pipe.said if word != "call"]
    assert words[:3] == ["asked", "example", "finding"]


def test_a_process_that_lost_its_device_takes_no_more_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (asking, child):
        monkeypatch.setattr(module, "lost_context", lambda device: "gone")
    pipe = Pipe(job(), job())
    child._do_jobs(pipe, Ours("torch"), CPU)  # type: ignore[arg-type]
    assert [word for word, _ in pipe.said if word not in ("call", "example")] == ["asked", "finding", "lost"]
    assert len(pipe.jobs) == 1


def test_time_is_shared_between_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def quick(planted: Property, *arguments: Any, seconds: float, **options: Any) -> Finding:
        shares.append(seconds)
        time.sleep(0.01)
        return Finding(planted.kind, planted.name, planted.promise, "small", "passed")

    monkeypatch.setattr(child, "ask", quick)
    child._do_jobs(Pipe(job()), Ours("torch"), CPU)  # type: ignore[arg-type]
    count = len(properties_of("PAGE"))
    assert shares[0] == pytest.approx(60 / count, rel=0.02)
    assert shares[-1] == pytest.approx(60 - 0.01 * (count - 1), rel=0.02)


def test_an_adapter_that_is_given_is_loaded() -> None:
    class Absent(Ours):
        def load(self, folder: Path | None = None) -> str | None:
            return None if folder else "no file libsomething.so"

    adapter = Absent("torch")
    assert load_adapter(adapter, Path()) is adapter
    with pytest.raises(Unsupported) as caught:
        load_adapter(adapter)
    assert "no file libsomething.so" in str(caught.value)
    assert caught.value.code == "software"


def test_a_name_is_looked_up() -> None:
    assert load_adapter("pagedmla:torch").name == "pagedmla:torch"
    with pytest.raises(InvalidArgument):
        load_adapter("nobody")


def test_findings_are_the_same_for_the_same_seed() -> None:
    def examples_of(seed: int) -> list[str]:
        told: list[str] = []
        asked(prop(lambda subject, spec: None), seed=seed, begin=lambda done, example: told.append(example))
        return told

    assert examples_of(1) == examples_of(1)
    assert examples_of(1) != examples_of(2)


def test_a_dead_context_of_a_failing_call_is_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(subject: Subject, spec: BatchSpec) -> None:
        raise Broken("raised AcceleratorError", Step(spec, {}))

    monkeypatch.setattr(asking, "lost_context", lambda device: "gone")
    finding = asked(prop(failing))
    assert finding.status == "died"
    assert finding.detail == "raised AcceleratorError; the device's context is lost: gone"
    assert "call = build(" in finding.reproducer
