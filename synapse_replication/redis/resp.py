"""The bytes of Redis: commands out, replies in.

hiredis reads the replies if it is installed; :class:`PureReader` does the same
in Python. txredisapi's own reader in Python takes one message a turn of the
reactor, and cuts the connection at a line that is not UTF-8.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from txredisapi import InvalidData, ResponseError

try:
    hiredis: Any = importlib.import_module("hiredis")
except ImportError:  # pragma: no cover -- it has wheels for most platforms
    hiredis = None

__all__ = [
    "MAX_REPLY_LENGTH",
    "PureReader",
    "Reader",
    "ReaderFactory",
    "encode",
    "encode_publishes",
    "new_reader",
]

#: The longest reply that is waited for, in bytes; its end has not come after
#: that many.
MAX_REPLY_LENGTH = 16 * 1024 * 1024


class Reader(Protocol):
    """Takes bytes as they come and gives the replies that are complete."""

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        ...

    def gets(self) -> Any:
        """Give the next reply, or ``False`` if there is none yet.

        An error reply is returned, as a ``ResponseError``.

        :raises InvalidData: the bytes are no reply of Redis.
        """
        ...


ReaderFactory: TypeAlias = Callable[[], Reader]


def new_reader() -> Reader:
    """Make the fastest reader that there is."""
    if hiredis is None:  # pragma: no cover
        return PureReader()
    reader: Reader = hiredis.Reader(protocolError=InvalidData, replyError=ResponseError)
    return reader


class _IncompleteError(Exception):
    """The rest has not arrived."""


class PureReader:
    """Reads the second version of Redis' protocol, in Python."""

    #: Arrays in arrays; what we ask for is answered with one.
    MAX_DEPTH = 8

    def __init__(self) -> None:
        self._buffer = b""
        self._offset = 0

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        self._buffer = self._buffer[self._offset :] + data
        self._offset = 0

    def gets(self) -> Any:
        """Give the next reply, or ``False`` if there is none yet.

        :raises InvalidData: the bytes are no reply of Redis.
        """
        try:
            reply, self._offset = self._read(self._offset, 0)
        except _IncompleteError:
            return False
        except ValueError:
            raise InvalidData("a length or a number is none") from None
        return reply

    def _read(self, start: int, depth: int) -> tuple[Any, int]:
        buffer = self._buffer
        end = buffer.find(b"\r\n", start)
        if end < 0:
            raise _IncompleteError
        kind = buffer[start : start + 1]
        text = buffer[start + 1 : end]
        start = end + 2
        if kind == b"$":
            length = int(text)
            if length < 0:
                return None, start
            end = start + length
            if len(buffer) < end + 2:
                raise _IncompleteError
            return buffer[start:end], end + 2
        if kind == b"*":
            if depth == self.MAX_DEPTH:
                raise InvalidData("arrays are nested too deeply")
            count = int(text)
            if count < 0:
                return None, start
            items = []
            for _ in range(count):
                item, start = self._read(start, depth + 1)
                items.append(item)
            return items, start
        if kind == b":":
            return int(text), start
        if kind == b"+":
            return text, start
        if kind == b"-":
            return ResponseError(text.decode("utf-8", "replace")), start
        raise InvalidData(f"a reply begins with {kind!r}")


def encode(*arguments: bytes) -> bytes:
    """Write one command."""
    return b"*%d\r\n" % len(arguments) + b"".join(
        b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments
    )


def encode_publishes(channel: bytes, messages: Iterable[bytes]) -> list[bytes]:
    """Write one PUBLISH a message, to be joined and written at once."""
    head = b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%b\r\n$" % (len(channel), channel)
    return [b"%b%d\r\n%b\r\n" % (head, len(text), text) for text in messages]
