"""The Redis wire format (RESP): encoding of commands, parsing of replies.

hiredis parses the replies. txredisapi's own parser, written in Python, handles at most
one bulk string per reactor turn, and cannot parse a line that is not UTF-8.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

import hiredis
from txredisapi import InvalidData, ResponseError

#: The longest reply, in bytes. A connection with a longer reply is aborted.
MAX_REPLY_LENGTH = 16 * 1024 * 1024
#: The largest number of items of an array; the expected arrays have three at most.
MAX_ITEMS = 999
#: The header of a larger array, map or set at the start of a chunk.
_LARGE: Final = re.compile(rb"[*%~>|][0-9]{4}")
#: The same bytes after a newline. They may also be text within a message.
_LARGE_IN_CHUNK: Final = re.compile(rb"(?<=\n)[*%~>|][0-9]{4}")
#: The end of a chunk that may be the beginning of such a header.
_UNFINISHED: Final = re.compile(rb"(?:\A|(?<=\n))[*%~>|][0-9]{0,3}\Z")
#: The number of bytes that are searched at each end of a chunk. The bytes in between,
#: mostly rows, are not searched.
_SEARCHED: Final = 8192


class ReplyReader(Protocol):
    """Incremental parser of replies."""

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        ...

    def gets(self) -> Any:
        """Return the next complete reply, or ``False`` if there is none yet.

        An error reply is returned as a ``ResponseError``, not raised.

        :raises InvalidData: if the bytes are not a Redis reply.
        """
        ...


ReaderFactory: TypeAlias = Callable[[], ReplyReader]


def new_reader() -> ReplyReader:
    """Return the parser of a connection."""
    return _GuardedReader()


class _GuardedReader:
    """hiredis' parser, protected from large arrays, which no command requests.

    hiredis allocates all items of an array when it parses the header, and needs 15 s to
    free 2**31 items. If the searched ends of a chunk contain bytes that may be the
    header of a large array, only the data before these bytes is fed to hiredis first.
    If that data ends within a string or a line, the bytes are text of a message;
    otherwise, they are a header, and the data is rejected.
    """

    def __init__(self) -> None:
        self._reader = hiredis.Reader(
            protocolError=InvalidData, replyError=ResponseError
        )
        #: Returns the next reply. It is hiredis' own method, except after a chunk that
        #: was fed in parts.
        self.gets: Callable[[], Any] = self._reader.gets
        self._replies: deque[Any] = deque()
        self._held = b""

    def feed(self, data: bytes) -> None:
        """Add received bytes.

        :raises InvalidData: if they contain the header of an array that is too large,
            or the bytes before a possible header are not a Redis reply.
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
        """Feed the data before the last possible header of a large array.

        :return: the remaining data, from that header on.
        :raises InvalidData: if the data contains such a header, or the bytes before a
            possible header are not a Redis reply.
        """
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
    """Encode one command."""
    return b"*%d\r\n" % len(arguments) + b"".join(
        b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments
    )


def encode_publishes(channel: bytes, messages: Iterable[bytes]) -> list[bytes]:
    """Encode one PUBLISH per message.

    :return: the encoded commands, which the caller joins and writes together.
    """
    head = b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%b\r\n$" % (len(channel), channel)
    return [b"%b%d\r\n%b\r\n" % (head, len(text), text) for text in messages]
