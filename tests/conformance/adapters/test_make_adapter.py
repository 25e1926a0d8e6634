"""Names: each known one gives its adapter, whatever else is an error that says what would do."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

import pagedmla
from pagedmla.conformance.adapters import ADAPTER_NAMES, make_adapter
from pagedmla.conformance.adapters.adapter import FEATURES, Adapter
from pagedmla.conformance.adapters.function import FunctionAdapter
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.contract.errors import InvalidArgument

SOMEBODYS = """
import pagedmla
from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.adapters.ours import Ours
def decode(q, kv_cache, block_table, seq_lens, **rest):
    return pagedmla.decode(q, kv_cache, block_table, seq_lens, **rest)
class Named(Ours):
    def __init__(self):
        super().__init__("torch")
        self.name = "mine"
class Nameless(Adapter):
    pass
class Needy(Adapter):
    def __init__(self, something):
        pass
it = Nameless()
number = 3
"""


@pytest.fixture
def somebodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module ``somebodys`` in the current folder, which is not on the module path."""
    (tmp_path / "somebodys.py").write_text(SOMEBODYS)
    (tmp_path / "broken.py").write_text("no_such_name\n")
    (tmp_path / "deep.py").write_text("import json\n\nimport raising\n")
    (tmp_path / "raising.py").write_text("class Own(Exception):\n    pass\n\n\nraise Own('no card')\n")
    (tmp_path / "unparsed.py").write_text("a = 1\ndef decode(:\n")
    (tmp_path / "needy.py").write_text("a = 1\nimport no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.parametrize("name", ADAPTER_NAMES)
def test_every_known_name_gives_an_adapter_of_this_name(name: str) -> None:
    adapter = make_adapter(name)
    assert adapter.name == name
    assert adapter.features <= FEATURES.keys()
    assert adapter.options[0] == {}
    assert adapter is not make_adapter(name)
    assert adapter.lines({})
    spec_free = adapter.conventions
    assert spec_free.lse_base in (None, 2.0, math.e)


def test_the_names_are_these() -> None:
    assert ADAPTER_NAMES == (
        "pagedmla",
        "pagedmla:gluon",
        "pagedmla:torch",
        "pagedmla:triton",
        "flash_mla",
        "flashinfer_fa2",
        "flashinfer_fa3",
        "vllm_triton",
        "fa3",
        "aiter",
    )


@pytest.mark.parametrize("name", ["", "cutlass", ":", "module:", ":function", "flash_mla:"])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidArgument, match="impl") as caught:
        make_adapter(name)
    assert caught.value.argument == "impl"
    for known in (*ADAPTER_NAMES, "aiter:module", "flash_mla:module", "flashinfer:module", "module:function"):
        assert known in str(caught.value)
    assert repr(name) in str(caught.value)


def test_an_unknown_backend_of_ours_lists_ours() -> None:
    with pytest.raises(InvalidArgument, match=r"one of .*triton, torch"):
        make_adapter("pagedmla:cutlass")


def test_a_function_an_adapter_or_a_class_of_them_is_taken(somebodys: None) -> None:
    function = make_adapter("somebodys:decode")
    assert isinstance(function, FunctionAdapter)
    assert function.name == "somebodys:decode"
    assert make_adapter("somebodys:Named").name == "mine"
    assert isinstance(make_adapter("somebodys:Named"), Ours)
    for name in ("somebodys:Nameless", "somebodys:it"):
        adapter = make_adapter(name)
        assert isinstance(adapter, Adapter)
        assert adapter.name == name
    assert make_adapter("somebodys:it") is sys.modules["somebodys"].it


def test_our_own_function_is_one_too() -> None:
    adapter = make_adapter("pagedmla:decode")
    assert isinstance(adapter, FunctionAdapter)
    assert adapter.version == f"pagedmla {pagedmla.__version__}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:decode", "a module no_such_module that imports"),
        ("no_such_module:decode", "No module named 'no_such_module'"),
        ("broken:decode", "NameError: name 'no_such_name' is not defined"),
        ("broken:decode", "is not defined (broken.py, line 1)"),
        ("deep:decode", "Own: no card (raising.py, line 5)"),
        ("unparsed:decode", "(unparsed.py, line 2) [impl]"),
        ("needy:decode", "No module named 'no_such_package' (needy.py, line 2)"),
        ("somebodys.py:decode", "a module name such as somebodys, not a file, got 'somebodys.py'"),
        ("./somebodys:decode", "a module name such as somebodys, not a file, got './somebodys'"),
        ("somebodys:encode", "an attribute of somebodys"),
        ("somebodys:encode", "'encode', which it does not have"),
        ("somebodys:number", "number, a int"),
        ("somebodys:number", "a function with pagedmla.decode's signature, or an Adapter"),
        ("somebodys:Needy", "an adapter without arguments"),
        ("somebodys:it.name", "which it does not have"),
    ],
)
def test_what_cannot_be_used_is_said_by_name(somebodys: None, name: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_adapter(name)
    assert (caught.value.code, caught.value.argument) == ("impl", "impl")
    assert words in str(caught.value)


def test_where_no_file_was_run_no_place_is_said(somebodys: None) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_adapter("no_such_module:decode")
    assert ", line " not in str(caught.value)


def test_what_does_not_parse_has_its_place_once(somebodys: None) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_adapter("unparsed:decode")
    assert str(caught.value).count(", line 2)") == 1


def test_making_adapters_loads_nothing_of_others() -> None:
    before = set(sys.modules)
    for name in ADAPTER_NAMES:
        make_adapter(name)
    assert {name.split(".")[0] for name in set(sys.modules) - before} <= {"pagedmla"}
    assert torch.device("cpu").type == "cpu"
