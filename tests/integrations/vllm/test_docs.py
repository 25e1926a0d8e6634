"""The user page names codes, settings and sizes that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pagedmla
from pagedmla.integrations.vllm.selection import HEAD_DIMS, PREFERRED_BLOCK_SIZE
from pagedmla.integrations.vllm.versions import NEWEST, OLDEST

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "vllm.md").read_text()
SOURCE = "".join(
    path.read_text()
    for folder in ("integrations/vllm", "contract")
    for path in sorted((Path(pagedmla.__file__).parent / folder).glob("*.py"))
)


def test_every_code_in_the_tables_is_in_the_source() -> None:
    tables = PAGE.split("| code | what |")[1:]
    assert len(tables) == 2
    codes = [
        code
        for table in tables
        for row in table.split("\n\n")[0].splitlines()[2:]
        for code in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert len(codes) == len(set(codes)) == 14
    # a code is a string, a keyword that gives its name, or stands in a message
    missing = [code for code in codes if not re.search(rf'"{code}"|\b{code}=|\[{code}\]', SOURCE)]
    assert missing == []


def test_the_page_says_the_sizes_and_releases_of_the_code() -> None:
    assert f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} are let in" in PAGE
    for size, (rank, rope) in HEAD_DIMS.items():
        assert f"{size} ({rank} + {rope})" in PAGE
    assert f"any; {PREFERRED_BLOCK_SIZE} where none is named" in PAGE
