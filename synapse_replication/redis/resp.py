"""The bytes of Redis: commands out, replies in.

hiredis reads the replies. txredisapi's own reader in Python takes one message a turn of
the reactor, and cuts the connection at a line that is not UTF-8.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

import hiredis
from txredisapi import InvalidData, ResponseError

__all__ = [
    "MAX_REPLY_LENGTH",
    "Reader",
    "ReaderFactory",
    "encode",
    "encode_publishes",
    "new_reader",
]

#: The longest reply that is waited for, in bytes; its end has not come after
#: that many.
MAX_REPLY_LENGTH = 16 * 1024 * 1024
#: The most items of an array; those that we ask for have three.
MAX_ITEMS = 999
#: The header of an array, a map or a set of more; at the end of a line, perhaps in the
#: middle of a message; and what may become one.
_LARGE: Final = re.compile(rb"[*%~>|][0-9]{4}")
_LARGE_IN_CHUNK: Final = re.compile(rb"(?<=\n)[*%~>|][0-9]{4}")
_UNFINISHED: Final = re.compile(rb"(?:\A|(?<=\n))[*%~>|][0-9]{0,3}\Z")
#: Of a longer chunk of bytes only both ends are searched: it is mostly rows.
_SEARCHED: Final = 8192


class Reader(Protocol):
    """Takes bytes as they come and gives the replies that are complete."""

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        ...

    def gets(self) -> Any:
        """Return the next reply, or ``False`` if there is none yet.

        An error reply is returned, as a ``ResponseError``.

        :raises InvalidData: if the bytes are no reply of Redis.
        """
        ...


ReaderFactory: TypeAlias = Callable[[], Reader]


def new_reader() -> Reader:
    """Make the reader of a connection."""
    return _GuardedReader()


class _GuardedReader:
    """hiredis' reader, guarded against arrays that nobody can have asked for.

    It makes room for all items of an array when it reads the header, and takes 15 s to
    give the room for 2**31 back. So a chunk in which such a header may stand is fed up
    to there: if nothing of it is left to be read then, no message is open in which it
    could stand, and it is a header.
    """

    def __init__(self) -> None:
        self._reader = hiredis.Reader(
            protocolError=InvalidData, replyError=ResponseError
        )
        #: Gives the next reply; hiredis' own except after a chunk that was divided.
        self.gets: Callable[[], Any] = self._reader.gets
        self._replies: deque[Any] = deque()
        self._held = b""

    def feed(self, data: bytes) -> None:
        """Take bytes.

        :raises InvalidData: if they begin an array that is too large.
        """
        if self._held:
            data = self._held + data
            self._held = b""
        length = len(data)
        if unfinished := _UNFINISHED.search(data, max(0, length - 4)):
            self._held = data[unfinished.start() :]
            data = data[: unfinished.start()]
        if (
            _LARGE.match(data)
            or _LARGE_IN_CHUNK.search(data, 0, _SEARCHED)
            or (length > _SEARCHED and _LARGE_IN_CHUNK.search(data, length - _SEARCHED))
        ):
            data = self._feed_up_to_headers(data)
        self._reader.feed(data)

    def _feed_up_to_headers(self, data: bytes) -> bytes:
        """Feed what may be a header of a large array bit by bit; return the rest."""
        starts = [match.start() for match in _LARGE_IN_CHUNK.finditer(data)]
        if _LARGE.match(data):
            starts.insert(0, 0)
        fed = 0
        self.gets = self._next
        for start in starts:
            self._reader.feed(data[fed:start])
            fed = start
            while (reply := self._reader.gets()) is not False:
                self._replies.append(reply)
            if not self._reader.has_data():
                raise InvalidData(f"an array has more than {MAX_ITEMS} items")
        return data[fed:]

    def _next(self) -> Any:
        if self._replies:
            return self._replies.popleft()
        self.gets = self._reader.gets
        return self._reader.gets()


def encode(*arguments: bytes) -> bytes:
    """Write one command."""
    return b"*%d\r\n" % len(arguments) + b"".join(
        b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments
    )


def encode_publishes(channel: bytes, messages: Iterable[bytes]) -> list[bytes]:
    """Write one PUBLISH a message, to be joined and written at once."""
    head = b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%b\r\n$" % (len(channel), channel)
    return [b"%b%d\r\n%b\r\n" % (head, len(text), text) for text in messages]
