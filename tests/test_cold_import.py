"""``import pagedmla`` needs torch and nothing else, touches no device, and what it gives works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKED = (
    "triton",
    "transformers",
    "safetensors",
    "numpy",
    "typer",
    "click",
    "rich",
    "vllm",
    "hypothesis",
    "jinja2",
    "pytest",
)

_PREAMBLE = f"""
import importlib.abc, sys, warnings

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
torch.set_num_threads(1)
"""

_DECODE = """
import pagedmla
before = {name.split(".")[0] for name in sys.modules}
q = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
cache = torch.randn(4, 2, 40, generator=torch.Generator().manual_seed(1))
table = torch.tensor([[3, 0], [1, -1]], dtype=torch.int32)
lens = torch.tensor([3, 1], dtype=torch.int32)
arguments = dict(softmax_scale=0.3, kv_lora_rank=32)
out, lse = pagedmla.decode(q, cache, table, lens, **arguments)
oracle_out, oracle_lse = pagedmla.reference.decode(q, cache, table, lens, **arguments)
# sequence 1 sees one key, so its answer is that key's latent and its score, with no softmax to trust
torch.testing.assert_close(out[1], cache[1, 0, :32].expand(3, 32))
torch.testing.assert_close(lse[1], 0.3 * (q[1] @ cache[1, 0]))
torch.testing.assert_close(out.double(), oracle_out.double(), rtol=1e-5, atol=1e-5)
torch.testing.assert_close(lse.double(), oracle_lse.double(), rtol=1e-5, atol=1e-5)
"""


def _fresh_interpreter(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PREAMBLE + source],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )


def test_import_alone_touches_no_device() -> None:
    done = _fresh_interpreter("""
import pagedmla
assert pagedmla.decode and pagedmla.DecodePlan and pagedmla.merge_states and pagedmla.reference
assert not torch.cuda.is_initialized()
print("ok")
""")
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr


def test_import_loads_nothing_of_the_optional_parts() -> None:
    done = _fresh_interpreter("""
import pagedmla
optional = ("pagedmla.cli", "pagedmla.integrations", "pagedmla.conformance", "pagedmla.embedded")
print([name for name in sys.modules if name.startswith(optional)])
""")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_decode_and_its_reference_run_with_torch_alone() -> None:
    done = _fresh_interpreter(_DECODE + "print('ok')")
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr


def test_the_block_blocks() -> None:
    done = _fresh_interpreter("import transformers")
    assert done.returncode == 1
    assert "No module named 'transformers'" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["generate"], ["check"]])
def test_the_command_says_which_extra_is_missing(arguments: list[str]) -> None:
    done = _fresh_interpreter(
        f"sys.argv = {['pagedmla', *arguments]!r}\nfrom pagedmla.cli.entry import run\nrun()\n"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().splitlines() == [
        "pagedmla: the command line needs typer: pip install 'pagedmla[cli]'"
    ]
