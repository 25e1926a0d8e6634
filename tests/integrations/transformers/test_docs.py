"""The user page's code runs, and the codes that it lists are raised somewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import pagedmla.integrations.transformers as integration

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "transformers.md").read_text()


def test_the_code_runs(
    tiny_model: Callable, padded_prompts: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    names = {"model": tiny_model("deepseek_v3"), "inputs": padded_prompts((9, 4))}
    exec("".join(blocks), names)
    assert names["output"].shape == (2, 9 + 20)
    # 2 layers of 64 + 16 float32 numbers; 9 and 4 tokens, and 19 generated ones that the model was shown
    assert capsys.readouterr().out.split() == ["640", str(640 * (9 + 4 + 2 * 19)), str(640 * 16 * (2 + 2))]


def test_every_code_in_the_table_is_in_the_source() -> None:
    table = PAGE[PAGE.index("| code |") :].split("\n\n")[0]
    codes = [code for row in table.splitlines()[2:] for code in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(codes) > 15
    source = "".join(path.read_text() for path in Path(integration.__path__[0]).glob("*.py"))
    # keyword refusals take their code from the keyword's name
    missing = [code for code in codes if f'"{code}"' not in source]
    assert missing == []
