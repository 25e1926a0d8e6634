"""Prints text while ``model.generate`` makes it, and keeps the time of every token."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

_REPLACEMENT = "\ufffd"


class TextPrinter:
    """A Transformers streamer: ``put`` gets the prompt's ids first, then each step's; ``end`` closes.

    Args:
        decode: token ids to text.
        stream: where the text goes; None keeps the times and prints nothing.

    Attributes:
        token_times: ``time.perf_counter()`` at which each new token reached the host, in seconds.
    """

    def __init__(self, decode: Callable[[list[int]], str], stream: TextIO | None = None) -> None:
        self.token_times: list[float] = []
        self._decode = decode
        self._stream = stream
        self._seen_prompt = False
        self._ids: list[int] = []
        self._printed = 0

    def put(self, ids: Any) -> None:
        """Takes a tensor of token ids: the prompt at the first call, new tokens after it."""
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        new = ids.reshape(-1).tolist()
        self.token_times.extend([time.perf_counter()] * len(new))
        if self._stream is not None:
            self._ids.extend(new)
            self._print(final=False)

    def end(self) -> None:
        """Prints what was held back and ends the line."""
        if self._stream is not None:
            self._print(final=True)
            self._stream.write("\n")
            self._stream.flush()

    def _print(self, final: bool) -> None:
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) and not final:
            return  # the last character's bytes are not all there yet
        self._write(text[self._printed :])
        self._printed = len(text)
        if text.endswith("\n"):
            # nothing before a line's end is decoded again, so a long text costs no more per token
            self._ids, self._printed = [], 0

    def _write(self, text: str) -> None:
        if self._stream is None or not text:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
        self._stream.flush()


def stdout_printer(decode: Callable[[list[int]], str]) -> TextPrinter:
    """A printer to this process's standard output."""
    return TextPrinter(decode, sys.stdout)
