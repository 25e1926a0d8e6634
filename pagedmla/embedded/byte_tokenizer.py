"""Byte-level tokenizer of the embedded model: one id per UTF-8 byte, no tables, no dependencies."""

import codecs
from collections.abc import Iterable

VOCAB_SIZE = 256
"""Ids 0 to 255 are the bytes themselves."""

BOS_ID = 0
"""Byte 0: written before every passage of the training text, never inside one."""

EOS_ID = 0
"""Byte 0 again: a passage ends where the next one begins."""


def encode(text: str, bos: bool = False) -> list[int]:
    """Return the UTF-8 bytes of ``text`` as ids, after :data:`BOS_ID` if ``bos`` is set."""
    ids = list(text.encode("utf-8"))
    return [BOS_ID, *ids] if bos else ids


def decode(ids: Iterable[int]) -> str:
    """Return the text of ``ids``; each invalid UTF-8 sequence becomes U+FFFD.

    Raises:
        ValueError: if an id is not in ``range(256)``.
    """
    return bytes(ids).decode("utf-8", errors="replace")


class IncrementalDecoder:
    """Decoder for streaming: text comes out as soon as the bytes of a character are complete.

    The pieces returned by :meth:`push` and :meth:`finish`, joined, equal :func:`decode` of all ids.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; return the text they complete, which may be empty."""
        return self._decoder.decode(bytes(ids))

    def finish(self) -> str:
        """End the stream; return U+FFFD if an incomplete character was pending, else the empty string."""
        return self._decoder.decode(b"", final=True)
