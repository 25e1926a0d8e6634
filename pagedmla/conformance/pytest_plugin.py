"""A fixture for pytest: one test of a test suite becomes a conformance check for each kind of fault and configuration.

    @pytest.mark.mla_conformance(impl="my_kernels:decode", kinds=("PAGE", "LSE"), examples=20, device="cuda")
    def test_my_kernel(mla_property):
        mla_property.check()

A suite switches it on: pytest_plugins = ["pagedmla.conformance.pytest_plugin"] in its conftest.py.  There is no entry point
that would load it, and torch with it, into every run of every project that has pagedmla installed.  Hypothesis and the kit
are imported where a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pagedmla.conformance.adapters.adapter import Adapter
    from pagedmla.conformance.asking import WatchedSubject
    from pagedmla.conformance.configurations import Configuration
    from pagedmla.conformance.findings import Finding

_FIXTURE = "mla_property"
_MARKER = (
    "mla_conformance(impl, kinds=None, configurations=None, examples=20, device='cpu', seed=0): examine the MLA decode impl "
    "('module:function', or an adapter) in the fixture mla_property: kinds of fault such as ('PAGE', 'LSE'), None: all; "
    "configurations: names or Configuration objects, None: all of the kit's"
)


@dataclass(frozen=True)
class Request:
    """What the marker says.

    Attributes:
        impl: what ``make_adapter`` takes, or an adapter.
        kinds: kinds of fault; None: all.
        configurations: names of the kit's own, or ``Configuration`` objects; None: all of the kit's.
        examples: most examples of a property.
        device: where.
        seed: of the draws.
    """

    impl: str | Adapter
    kinds: Sequence[str] | None = None
    configurations: Sequence[str | Configuration] | None = None
    examples: int = 20
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class MLAProperty:
    """The fixture's value: all promises of one kind, for one configuration.

    Attributes:
        kind: of fault.
        configuration: what the examples are drawn for.
        request: what the marker says.
        subject: the implementation, loaded.
    """

    kind: str
    configuration: Configuration
    request: Request
    subject: WatchedSubject

    def findings(self) -> list[Finding]:
        """Asks for each promise, in this process: what crashes or hangs takes the test run with it."""
        from pagedmla.conformance.asking import ask
        from pagedmla.conformance.properties import properties_of

        return [
            ask(
                prop,
                self.subject,
                self.configuration,
                examples=self.request.examples,
                seed=self.request.seed,
            )
            for prop in properties_of(self.kind)
        ]

    def check(self) -> None:
        """Fails the test with detail and reproducer of every promise that is broken; skips it when nothing could be asked."""
        findings = self.findings()
        bad = [finding for finding in findings if finding.bad]
        if bad:
            pytest.fail("\n\n".join(_text(finding) for finding in bad), pytrace=False)
        if all(finding.status != "passed" for finding in findings):
            reasons = dict.fromkeys(f"{finding.status}: {finding.detail}" for finding in findings)
            pytest.skip("; ".join(reasons))


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each kind and configuration."""
    if _FIXTURE not in metafunc.fixturenames:
        return
    request = _request(metafunc.definition)
    from pagedmla.contract.errors import PagedMLAError

    try:
        kinds, columns = _kinds(request), _configurations(request)
    except PagedMLAError as error:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {error}") from error
    pairs = [(kind, column) for kind in kinds for column in columns]
    names = [f"{kind}-{column.name.replace(' ', '-')}" for kind, column in pairs]
    metafunc.parametrize(_FIXTURE, pairs, indirect=True, ids=names)


@pytest.fixture
def mla_property(request: pytest.FixtureRequest) -> MLAProperty:
    """The promises of one kind for one configuration, of the implementation that the marker names."""
    kind, configuration = request.param
    asked = _request(request.node)
    return MLAProperty(kind, configuration, asked, _subject(asked))


def _request(item: pytest.Item) -> Request:
    marker = item.get_closest_marker("mla_conformance")
    if marker is None:
        raise pytest.UsageError(
            f"{item.nodeid} asks for {_FIXTURE}: it needs @pytest.mark.mla_conformance(impl='module:function')"
        )
    try:
        return Request(*marker.args, **marker.kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"{item.nodeid}: mla_conformance: {error}") from error


def _kinds(request: Request) -> list[str]:
    from pagedmla.conformance.properties import KINDS, properties_of

    kinds = (
        [request.kinds]
        if isinstance(request.kinds, str)
        else list(KINDS if request.kinds is None else request.kinds)
    )
    for kind in kinds:
        properties_of(kind)
    return kinds


def _configurations(request: Request) -> list[Configuration]:
    from pagedmla.conformance.configurations import CONFIGURATIONS
    from pagedmla.contract.errors import InvalidArgument

    if request.configurations is None:
        return list(CONFIGURATIONS)
    known = {configuration.name: configuration for configuration in CONFIGURATIONS}
    given = request.configurations
    found = []
    for one in (given,) if isinstance(given, str) else given:
        if isinstance(one, str) and one not in known:
            raise InvalidArgument("configuration", "configurations", "some of " + ", ".join(known), repr(one))
        found.append(known[one] if isinstance(one, str) else one)
    return found


def _subject(request: Request) -> WatchedSubject:
    import torch

    from pagedmla.conformance.asking import WatchedSubject
    from pagedmla.conformance.child import load_adapter
    from pagedmla.contract.errors import PagedMLAError

    try:
        adapter = load_adapter(request.impl)
    except PagedMLAError as error:
        pytest.fail(str(error), pytrace=False)
    return WatchedSubject(adapter, torch.device(request.device))


def _text(finding: Finding) -> str:
    parts = [f"{finding.title}: {finding.status}", f"promise: {finding.promise}", finding.detail]
    return "\n".join([*parts, "", finding.reproducer or f"example: {finding.example}"])
