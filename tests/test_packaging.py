"""What is shipped and what the pages promise about it agree."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import pagedmla
from pagedmla import embedded

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
MIB = 1024 * 1024


def pins(file: str) -> dict[str, str]:
    """name -> version of each ``name==version`` line."""
    lines = (ROOT / file).read_text().splitlines()
    return dict(re.match(r"([\w-]+)==([\w.]+)", line).groups() for line in lines if "==" in line)  # type: ignore[union-attr]


def requirements() -> list[Requirement]:
    """Every requirement in pyproject.toml, the extras' included; the build's are not among them."""
    tables = PYPROJECT[PYPROJECT.index("[project]") : PYPROJECT.index("[project.scripts]")]
    lines = [line.partition("#")[0] for line in tables.splitlines() if not line.startswith("name")]
    return [Requirement(text) for line in lines for text in re.findall(r'"([\w-]+>=[^"]+)"', line)]


def readme_commands() -> list[str]:
    return re.findall(
        r"^```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )


def test_one_version_everywhere() -> None:
    project = re.search(r'^version = "([^"]+)"', PYPROJECT, flags=re.MULTILINE)
    changelog = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert project is not None
    assert changelog is not None
    assert pagedmla.__version__ == project[1] == changelog[1]


def test_the_base_dependency_is_torch_alone() -> None:
    base = PYPROJECT[PYPROJECT.index("dependencies = [") : PYPROJECT.index("[project.optional-dependencies]")]
    assert re.findall(r'"([\w-]+)', base) == ["torch"]


def test_every_requirement_has_a_lower_bound_that_its_pin_meets() -> None:
    pinned, newest = pins("constraints.txt"), pins("constraints-newest.txt")
    found = {requirement.name: requirement for requirement in requirements()}
    assert {"torch", "transformers", "safetensors", "typer", "rich", "pytest", "hypothesis"} <= set(found)
    for name, requirement in found.items():
        assert any(specifier.operator == ">=" for specifier in requirement.specifier), name
        for pin in {pinned.get(name), newest.get(name)} - {None}:
            assert requirement.specifier.contains(pin), (name, pin)


def test_constraints_pin_everything_that_the_tests_install() -> None:
    pinned = pins("constraints.txt")
    assert {requirement.name for requirement in requirements()} - set(pinned) == {"mkdocs"}
    newest = pins("constraints-newest.txt")
    assert newest["torch"] == pinned["torch"]
    assert newest["transformers"] != pinned["transformers"]


def test_the_readme_names_the_versions_that_are_pinned() -> None:
    sentence = re.search(r"^Tested with .*$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert sentence is not None
    for version in (pins("constraints.txt")["torch"], *(pins(f)["transformers"] for f in _CONSTRAINTS)):
        assert version in sentence[0]


_CONSTRAINTS = ("constraints.txt", "constraints-newest.txt")


def test_continuous_integration_runs_the_readmes_own_test_command() -> None:
    install, test = readme_commands()
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert test in lines
    assert install.endswith(".venv/bin/pagedmla generate --compare")
    assert all("\n" not in command for command in (install, test))


@pytest.mark.parametrize("file", [".ci/run"])
def test_scripts_parse_and_may_be_executed(file: str) -> None:
    path = ROOT / file
    assert path.stat().st_mode & 0o111
    assert "set -euo pipefail" in path.read_text()
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_the_embedded_model_is_inside_the_package_and_small() -> None:
    directory = Path(embedded.model_dir())
    assert directory.is_relative_to(Path(pagedmla.__file__).parent)
    files = {file.name: file.stat().st_size for file in directory.iterdir()}
    assert {"config.json", "model.safetensors"} <= set(files)
    assert sum(files.values()) < 13 * MIB


def test_the_wheel_takes_every_file_of_the_package() -> None:
    # hatchling puts in all files under a listed package that git does not ignore
    assert 'packages = ["pagedmla"]' in PYPROJECT
    patterns = [line for line in (ROOT / ".gitignore").read_text().split() if not line.endswith("/")]
    for file in (Path(pagedmla.__file__).parent / "embedded").rglob("*"):
        assert not any(file.match(pattern) for pattern in patterns if file.suffix not in (".pyc",)), file


def test_the_installed_command_is_the_entry_point() -> None:
    scripts = metadata.entry_points(group="console_scripts", name="pagedmla")
    assert [script.value for script in scripts] == ["pagedmla.cli.entry:run"]
    assert callable(next(iter(scripts)).load())


def test_the_transformers_extra_excludes_what_the_integration_refuses() -> None:
    specifier = next(r.specifier for r in requirements() if r.name == "transformers")
    assert isinstance(specifier, SpecifierSet)
    assert not specifier.contains("5.14.1")
    assert specifier.contains("5.15.0")
    assert specifier.contains("5.24.0")
    assert not specifier.contains("6.0.0")


def test_nothing_names_a_registry_host() -> None:
    for file in (*ROOT.glob("*.txt"), *ROOT.glob("*.toml"), ROOT / ".ci" / "run", ROOT / "README.md"):
        assert "pypi" not in file.read_text().lower(), file
        assert "index-url" not in file.read_text(), file
