"""The user page's program runs on two processes, and its numbers are right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "context_parallel.md").read_text()


def test_the_program_runs_as_the_page_says(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "sharded.py").write_text(program)
    command = re.search(r"run: torchrun (.*)$", PAGE, flags=re.MULTILINE)
    assert command is not None
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1].split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"rank (\d) holds (\d+) of 131 tokens; difference (\d+e[+-]\d+)", done.stdout)
    # 131 = 4 * 32 + 3: rank 0 has 64 + 3
    assert sorted(row[:2] for row in found) == [("0", "67"), ("1", "64")]
    assert all(float(difference) < 1e-5 for _, _, difference in found)


def test_the_codes_of_the_errors_are_in_the_source() -> None:
    source = (ROOT / "pagedmla" / "distributed" / "agreement.py").read_text()
    codes = re.findall(r"\[(\w+)\]$", PAGE, flags=re.MULTILINE)
    assert codes == ["ranks_differ"]
    assert all(f'"{code}"' in source for code in codes)
