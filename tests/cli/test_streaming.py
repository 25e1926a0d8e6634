"""Text is printed as it is made, never half a character, and nothing twice."""

from __future__ import annotations

import io

import pytest
import torch

from pagedmla.cli.streaming import TextPrinter


def decode(ids: list[int]) -> str:
    """Ids are UTF-8 bytes; an unfinished character decodes to the replacement character."""
    return bytes(ids).decode("utf-8", errors="replace")


def stream(text: str) -> tuple[list[str], TextPrinter]:
    """What had been written after each byte of ``text``, and at the end."""
    written = io.StringIO()
    printer = TextPrinter(decode, written)
    printer.put(torch.tensor([[1, 2, 3]]))
    states = []
    for byte in text.encode():
        printer.put(torch.tensor([byte]))
        states.append(written.getvalue())
    printer.end()
    return [*states, written.getvalue()], printer


@pytest.mark.parametrize("text", ["plain", "two\nlines\n", "naïve café", "日本語 and 🌊\nagain", ""])
def test_what_is_printed_is_the_text(text: str) -> None:
    assert stream(text)[0][-1] == text + "\n"


def test_it_is_printed_as_it_is_made() -> None:
    assert stream("abc")[0] == ["a", "ab", "abc", "abc\n"]


def test_a_character_waits_for_its_last_byte() -> None:
    assert stream("aé!")[0] == ["a", "a", "aé", "aé!", "aé!\n"]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    written = io.StringIO()
    printer = TextPrinter(decode, written)
    printer.put(torch.tensor([[0]]))
    printer.put(torch.tensor([0xC3]))
    assert written.getvalue() == ""
    printer.end()
    assert written.getvalue() == "\ufffd\n"


def test_the_prompt_is_neither_printed_nor_timed() -> None:
    states, printer = stream("ab")
    assert states[-1] == "ab\n"
    assert len(printer.token_times) == 2
    assert printer.token_times == sorted(printer.token_times)


def test_without_a_stream_only_times_are_kept() -> None:
    printer = TextPrinter(decode)
    printer.put(torch.tensor([[1]]))
    printer.put(torch.tensor([65, 66]))
    printer.end()
    assert len(printer.token_times) == 2


def test_a_terminal_that_lacks_a_character_gets_a_question_mark() -> None:
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, encoding="ascii")
    printer = TextPrinter(decode, terminal)
    printer.put(torch.tensor([[1]]))
    for byte in "né".encode():
        printer.put(torch.tensor([byte]))
    printer.end()
    assert raw.getvalue() == b"n?\n"
