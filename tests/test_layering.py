"""Who may import whom.

The rule is data (LAYERS); the walk reads every import in the package's source, lazy ones included.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "pagedmla"


@dataclass(frozen=True)
class Layer:
    """A part of the package.

    Attributes:
        imports: other layers that it may import.  Its own modules are always allowed.
        third_party: distributions that it may import, at module level or later.
    """

    imports: frozenset[str]
    third_party: frozenset[str] = frozenset({"torch"})


def layer(*imports: str, third_party: tuple[str, ...] = ()) -> Layer:
    return Layer(frozenset(imports), frozenset({"torch", *third_party}))


_CORE = ("contract", "paging")
_KERNELS = ("kernels", "kernels.torch", "kernels.split_kv", "kernels.triton", "kernels.gluon")
_API = (*_CORE, "decode", "ops", "root")
LAYERS: dict[str, Layer] = {
    "contract": layer(),
    "reference": layer("contract"),
    "paging": layer("contract"),
    # the registry and the policy; backends are loaded by name
    "kernels": layer(*_CORE, *_KERNELS[1:]),
    "kernels.torch": layer(*_CORE),
    # no backend: the plan and the merge around those that cut keys by a plan on the device
    "kernels.split_kv": layer(*_CORE, third_party=("triton",)),
    "kernels.triton": layer(*_CORE, "kernels.split_kv", third_party=("triton",)),
    "kernels.gluon": layer(*_CORE, "kernels.split_kv", third_party=("triton",)),
    "decode": layer(*_CORE, *_KERNELS, "ops"),
    "ops": layer(*_CORE, *_KERNELS, "decode"),
    # pagedmla/__init__.py: names only
    "root": layer(*_CORE, "reference", "decode", "ops"),
    "embedded": layer("contract"),
    "compat": layer(*_API),
    "distributed": layer(*_API),
    "integrations": layer(*_API, third_party=("transformers", "vllm")),
    # pytest: in its plug-in alone; the others behind the extra, or to ask whether somebody's software is here
    "conformance": layer(
        *_API, "reference", third_party=("hypothesis", "jinja2", "pytest", "triton", "vllm", "flashinfer")
    ),
    "bench": layer(*_API, "conformance", third_party=("triton", "matplotlib")),
    "cli": layer(
        *_API,
        "kernels",
        "reference",
        "embedded",
        "compat",
        "distributed",
        "integrations",
        "conformance",
        "bench",
        third_party=("transformers", "huggingface_hub", "safetensors", "typer", "rich", "triton"),
    ),
}
"""contract <- reference, paging <- kernels.* <- decode, ops <- compat, integrations, distributed <- cli."""

# modules of the decode layer that are split over several files
ALIASES = {
    "explain": "decode",
    "merge": "decode",
    "validation": "decode",
    "plan": "decode",
    "dispatch": "decode",
}


def layer_of(module: str) -> str:
    """The layer that ``module`` (dotted, from the package's name on) belongs to; "" when none is declared."""
    parts = module.split(".")[1:]
    if not parts:
        return "root"
    if parts[0] == "kernels" and len(parts) > 1 and f"kernels.{parts[1]}" in LAYERS:
        return f"kernels.{parts[1]}"
    name = ALIASES.get(parts[0], parts[0])
    return name if name in LAYERS else ""


def module_name(path: Path, root: Path) -> str:
    """Dotted name of the source file at ``path`` under ``root``."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that the file imports, relative and lazy imports resolved."""
    module = module_name(path, root)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, _member(base, alias.name, root)) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_module(node.func) and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value


def _member(base: str, name: str, root: Path) -> str:
    """``from base import name``: the submodule if there is one, else the module itself."""
    folder = root.joinpath(*base.split("."))
    is_module = (folder / f"{name}.py").exists() or (folder / name).is_dir()
    return f"{base}.{name}" if is_module else base


def _is_import_module(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def violations(root: Path) -> list[str]:
    """Every import under ``root``/pagedmla that LAYERS does not allow, as "file:line: reason"."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        module = module_name(path, root)
        own = layer_of(module)
        where = path.relative_to(root).as_posix()
        if not own:
            found.append(f"{where}:1: {module} is in no declared layer")
            continue
        for line, name in imported_names(path, root):
            reason = _objection(own, name)
            if reason:
                found.append(f"{where}:{line}: {reason}")
    return found


def _objection(own: str, name: str) -> str:
    top = name.split(".")[0]
    if top != PACKAGE:
        if top in sys.stdlib_module_names or top in LAYERS[own].third_party:
            return ""
        return f"{own} imports {name}, which is not among its dependencies"
    other = layer_of(name)
    if other == own or other in LAYERS[own].imports:
        return ""
    # a backend may name the configuration that the policy hands it, and nothing else of its parent
    if own.startswith("kernels.") and name.startswith("pagedmla.kernels.policy"):
        return ""
    return f"{own} imports {name} ({other or 'undeclared'}), a layer that it may not know"


def test_the_package_keeps_its_layers() -> None:
    assert violations(ROOT) == []


def test_only_the_command_line_imports_the_command_line() -> None:
    assert [name for name, rule in LAYERS.items() if "cli" in rule.imports] == []


def _cycles() -> list[tuple[str, str]]:
    # decode and ops are one layer in two files, and a backend's registry names its backends
    return [
        (a, b)
        for a in LAYERS
        for b in LAYERS[a].imports
        if a in LAYERS[b].imports and {a, b} != {"decode", "ops"}
    ]


def test_the_rule_itself_has_a_direction() -> None:
    assert _cycles() == []


@pytest.mark.parametrize(
    ("file", "line", "part"),
    [
        ("contract/problem.py", "import pagedmla.decode", "contract imports pagedmla.decode"),
        ("contract/problem.py", "from .. import reference", "contract imports pagedmla.reference"),
        ("reference.py", "from pagedmla.paging import kv_cache", "reference imports pagedmla.paging"),
        ("kernels/torch/decode.py", "from pagedmla.kernels.triton import decode", "kernels.torch imports"),
        (
            "kernels/torch/decode.py",
            "from pagedmla import reference",
            "kernels.torch imports pagedmla.reference",
        ),
        ("kernels/torch/decode.py", "def f():\n    import pagedmla", "kernels.torch imports pagedmla (root)"),
        (
            "kernels/torch/decode.py",
            "import importlib\nimportlib.import_module('pagedmla.cli')",
            "imports pagedmla.cli",
        ),
        (
            "decode.py",
            "from pagedmla.integrations import transformers",
            "decode imports pagedmla.integrations",
        ),
        ("decode.py", "import triton", "decode imports triton"),
        ("paging/kv_cache.py", "import numpy as np", "paging imports numpy"),
        ("conformance/cases.py", "import pagedmla.cli", "conformance imports pagedmla.cli"),
        ("integrations/transformers.py", "from pagedmla.conformance import cases", "integrations imports"),
        ("helpers.py", "import torch", "pagedmla.helpers is in no declared layer"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, line: str, part: str) -> None:
    for name in (
        file,
        "kernels/triton/decode.py",
        "reference.py",
        "paging/kv_cache.py",
        "conformance/cases.py",
        "integrations/transformers.py",
        "cli/main.py",
        "decode.py",
    ):
        target = tmp_path / PACKAGE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    assert violations(tmp_path) == [] if file != "helpers.py" else True
    (tmp_path / PACKAGE / file).write_text(f"import torch\n{line}\n")
    found = violations(tmp_path)
    assert len(found) == 1
    assert part in found[0]


def test_allowed_imports_pass(tmp_path: Path) -> None:
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "decode.py").write_text(
        "import torch\nfrom pagedmla.contract import errors\nfrom pagedmla.kernels import load\n"
    )
    (folder / "__init__.py").write_text(
        "from pagedmla.decode import decode\nfrom pagedmla import reference\n"
    )
    (folder / "reference.py").write_text("from __future__ import annotations\nimport math\nimport torch\n")
    assert violations(tmp_path) == []
