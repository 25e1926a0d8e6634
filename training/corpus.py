"""Build the byte corpus of the embedded model from text that Debian packages ship.

Sources, all Debian 12 packages (see ``training/README.md`` for the commands that fetch and unpack them):

* ``r-cran-janeaustenr`` 1.0.0-1: the six novels of Jane Austen (public domain; the package is MIT).
* ``r-cran-tokenizers`` 0.3.0-1: *Moby-Dick* by Herman Melville (public domain; the package is MIT).
* ``bible-kjv`` and ``bible-kjv-text`` 4.38: the King James Version of 1611 (public domain text).

Nothing is fetched here, at import or later: ``build`` reads unpacked packages and writes four files:
``train.bin``, ``valid.bin``, ``heldout.bin`` and ``manifest.json``. In each ``.bin`` file every passage is
preceded by byte 0, the separator that the model knows as its begin and end of sequence.
"""

import hashlib
import json
import re
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Annotated

import typer

SEPARATOR = b"\0"
"""Written before every passage; id 0 is the model's ``bos_token_id`` and ``eos_token_id``."""

BLOCK_BYTES = 16 * 1024
"""Nominal length of the contiguous blocks that the split is made of, cut at paragraph ends."""

SPLIT_PERIOD = 40
"""Of every 40 consecutive blocks, one is for validation (index 10) and one is held out (index 30)."""

PACKAGES = {
    "austen": "Debian r-cran-janeaustenr 1.0.0-1",
    "melville": "Debian r-cran-tokenizers 0.3.0-1",
    "kjv": "Debian bible-kjv and bible-kjv-text 4.38",
}

EXPECTED_SHA256 = {
    "train.bin": "f8ab86e8b33fdce520edc47912a910b8b2f4d6382ba45903f52e66aa944a1cfe",
    "valid.bin": "742d06dc64ca347f836631ba246e611d45aeb4b1ec09291d43a04c93d8ec67f7",
    "heldout.bin": "6748d2f12bf38e3ce91d18cb502a651cde451fc6cf83017f538431997814d8a1",
}
"""Digests of the files that the published weights were trained and scored on."""

app = typer.Typer(add_completion=False, help=__doc__)


class _RReader:
    """Reader for the part of R's XDR serialisation format that lazy-load data files use.

    Handles strings, string and integer vectors, lists and their attributes; anything else raises
    ``ValueError``. The format is documented in the manual "R Internals", section "Serialization Formats".
    """

    def __init__(self, data: bytes):
        if data[:2] != b"X\n":
            raise ValueError("not an XDR serialisation")
        version = struct.unpack_from(">i", data, 2)[0]
        self.data, self.pos = data, 14
        if version == 3:  # version 3 adds the name of the native encoding
            self.pos += 4 + struct.unpack_from(">i", data, 14)[0]

    def _int(self) -> int:
        value = struct.unpack_from(">i", self.data, self.pos)[0]
        self.pos += 4
        return value

    def item(self):
        """Return the next object: str, list, dict (from a pairlist) or ``None``.

        A list with a ``names`` attribute is returned as a dict from name to value.
        """
        flags = self._int()
        kind, has_attributes = flags & 0xFF, bool(flags & 0x200)
        if kind in (0xFE, 0xFF):  # NULL, or a reference to a symbol seen before
            return "names" if kind == 0xFF else None
        if kind == 1:  # a symbol wraps the string that names it
            return self.item()
        if kind == 9:
            size = self._int()
            self.pos += max(size, 0)
            return self.data[self.pos - size : self.pos].decode("utf-8") if size >= 0 else None
        if kind == 2:  # pairlist cell: tag, value, rest; lazy-load files hold tagged attributes only
            tag, value, rest = self.item(), self.item(), self.item()
            return {tag: value, **(rest or {})}
        if kind in (10, 13):
            value = [self._int() for _ in range(self._int())]
        elif kind in (16, 19):
            value = [self.item() for _ in range(self._int())]
        else:
            raise ValueError(f"R object type {kind} is not handled")
        names = (self.item() or {}).get("names") if has_attributes else None
        return dict(zip(names, value, strict=True)) if names else value


def read_lazyload(stem: Path) -> dict[str, str]:
    """Read the text data sets of an installed R package.

    Args:
        stem: path of ``Rdata`` in the package's ``data`` folder, without the ``.rdb``/``.rdx`` suffix.

    Returns:
        One entry per data set: name to text, its strings joined by newlines.
    """
    index = _RReader(zlib.decompress(stem.with_suffix(".rdx").read_bytes(), 47)).item()
    blob = stem.with_suffix(".rdb").read_bytes()
    texts = {}
    for name, (offset, size) in index["variables"].items():
        # each record is a big-endian length of the plain data and then a zlib stream
        strings = _RReader(zlib.decompress(blob[offset + 4 : offset + size])).item()
        values = strings.values() if isinstance(strings, dict) else strings
        texts[name] = "\n".join(values)
    return texts


def unwrap(text: str) -> list[str]:
    """Split hard-wrapped text at blank lines; return its paragraphs, one line each, without ``_`` marks."""
    text = text.replace("\r", "").replace("\ufeff", "").replace("_", "")
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    editorial = ("[At this point in", "[End volume")
    return [p for p in paragraphs if p and not p.startswith(editorial)]


def austen(root: Path) -> list[list[str]]:
    """Paragraphs of each Austen novel, in the package's (alphabetical) order."""
    novels = read_lazyload(root / "usr/lib/R/site-library/janeaustenr/data/Rdata")
    # Northanger Abbey ends with a modern editor's note, which is not Austen's text
    return [unwrap(re.split(r"\n\s*A NOTE ON THE TEXT", text)[0]) for _, text in sorted(novels.items())]


def melville(root: Path) -> list[list[str]]:
    """Paragraphs of Moby-Dick from its first chapter to its end, without the transcribers' notes."""
    text = read_lazyload(root / "usr/lib/R/site-library/tokenizers/data/Rdata")["mobydick"]
    return [unwrap(text[text.index("CHAPTER 1. Loomings.") : text.index("End of Project Gutenberg")])]


def kjv(root: Path) -> list[list[str]]:
    """Chapters of each book of the King James Version, one verse a line, without verse numbers."""
    command = [root / "usr/bin/bible", "-f", "-p", root / "usr/lib", "gen1:1-rev22:21"]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout
    books: dict[str, dict[str, list[str]]] = {}
    for line in output.splitlines():
        match = re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line)
        if match:
            book, chapter, verse = match.groups()
            books.setdefault(book, {}).setdefault(chapter, []).append(verse.strip())
    return [["\n".join(verses) for verses in chapters.values()] for chapters in books.values()]


def blocks(paragraphs: list[str]) -> list[bytes]:
    """Join one work's paragraphs into contiguous UTF-8 blocks of about :data:`BLOCK_BYTES` bytes."""
    out, block = [], b""
    for paragraph in paragraphs:
        block += paragraph.encode() + b"\n\n"
        if len(block) >= BLOCK_BYTES:
            out, block = [*out, block], b""
    return [*out, block] if block else out


def split(works: dict[str, list[list[str]]]) -> dict[str, list[tuple[str, bytes]]]:
    """Assign every block to one split.

    Consecutive training blocks of a work are joined into one passage, so a passage ends only where its work
    ends or where a validation or held-out block was taken out.

    Args:
        works: source name to works, each a list of paragraphs.

    Returns:
        For ``train``, ``valid`` and ``heldout``: passages as (source name, UTF-8 text), in corpus order.
    """
    splits: dict[str, list[tuple[str, bytes]]] = {"train": [], "valid": [], "heldout": []}
    number = 0
    for source, texts in works.items():
        for paragraphs in texts:
            passage = b""
            for block in blocks(paragraphs):
                target = {10: "valid", 30: "heldout"}.get(number % SPLIT_PERIOD)
                number += 1
                if target is None:
                    passage += block
                    continue
                splits[target].append((source, block))
                if passage:
                    splits["train"].append((source, passage))
                passage = b""
            if passage:
                splits["train"].append((source, passage))
    return splits


def load(folder: Path, name: str) -> list[tuple[str, bytes]]:
    """Read one split back: passages as (source name, UTF-8 text without the separator), in corpus order."""
    manifest = json.loads((folder / "manifest.json").read_text())
    passages = (folder / f"{name}.bin").read_bytes().split(SEPARATOR)[1:]
    return list(zip(manifest["files"][f"{name}.bin"]["passage_sources"], passages, strict=True))


@app.command()
def build(
    packages: Annotated[Path, typer.Option(help="folder the packages were unpacked in, or / if installed")],
    out: Annotated[Path, typer.Option(help="folder to write the corpus to")] = Path(".corpus"),
) -> None:
    """Write the three splits and manifest.json; exit 1 if the splits differ from the recorded ones."""
    out.mkdir(parents=True, exist_ok=True)
    works = {"austen": austen(packages), "melville": melville(packages), "kjv": kjv(packages)}
    files, same = {}, True
    for name, passages in split(works).items():
        data = b"".join(SEPARATOR + text for _, text in passages)
        (out / f"{name}.bin").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        same &= digest == EXPECTED_SHA256[f"{name}.bin"]
        files[f"{name}.bin"] = {
            "bytes": len(data),
            "sha256": digest,
            "passage_sources": [source for source, _ in passages],
        }
        typer.echo(f"{name}.bin  {len(data)} bytes  {len(passages)} passages  sha256 {digest}")
    (out / "manifest.json").write_text(json.dumps({"packages": PACKAGES, "files": files}, indent=1) + "\n")
    if not same:
        typer.echo("these files differ from the ones that the published weights were trained on", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
