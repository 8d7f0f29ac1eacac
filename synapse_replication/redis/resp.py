"""The Redis wire format (RESP): encoding of commands, parsing of replies.

hiredis parses the replies. txredisapi's own parser, written in Python, handles at most
one bulk string per reactor turn, and cannot parse a line that is not UTF-8.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import hiredis
from txredisapi import InvalidData, ResponseError

#: The longest reply, in bytes. A connection with a longer reply is aborted.
MAX_REPLY_LENGTH = 16 * 1024 * 1024
#: The longest text of an error reply, in characters; the rest is dropped. It becomes a
#: part of log lines, and of what limits the rate of these.
MAX_ERROR_LENGTH = 1000
#: The largest number of items of an array; the expected arrays have three at most.
MAX_ITEMS = 999
#: The header of a larger array, map or set, or of a string of a million bytes.
_LARGE: Final = re.compile(rb"[*%~>|][0-9]{4}|\$([0-9]{7,18})\r\n")
#: The beginning of such a header, after a newline; also possible within a message. It
#: begins with one branch, because every line of a chunk is tried.
_LARGE_IN_CHUNK: Final = re.compile(rb"\n.[0-9]{4}(?:(?<!\$....)|[0-9]{3})", re.DOTALL)
#: The end of a chunk that may be the beginning of such a header.
_UNFINISHED: Final = re.compile(
    rb"(?:\A|(?<=\n))(?:[*%~>|][0-9]{0,3}|\$[0-9]{0,18}\r?)\Z"
)


class Parser(Protocol):
    """The part of a parser of replies that a connection uses."""

    def feed(self, data: bytes) -> None:
        """Add received bytes.

        :raises InvalidData: if they cannot be the reply of a Redis server.
        """

    def gets(self) -> Any:
        """Return the next complete reply, or ``False`` if there is none yet.

        :raises InvalidData: if the bytes are not a Redis reply.
        """


def _make_error(text: str) -> ResponseError:
    if len(text) > MAX_ERROR_LENGTH:
        text = f"{text[:MAX_ERROR_LENGTH]}..."
    return ResponseError(text)


class ReplyParser:
    """The parser of a connection: that of hiredis, protected from large replies.

    hiredis allocates all items of an array when it parses the header, and needs 15 s to
    free 2**31 items. It stores a string as a whole; after one of 15 MiB, the C library
    retains 32 MiB. If a chunk contains bytes that may be the header of a large array or
    string, only the data before these bytes is fed to hiredis first. If that data ends
    within a string or a line, the bytes are text of a message. Otherwise, they are a
    header: the data of an array is rejected, and a long string is truncated.

    :param longest: the length in bytes, at least 10**6, beyond which a string is
        truncated to one byte more. The rest is never stored.
    :ivar gets: returns the next complete reply, or ``False`` if there is none yet. An
        error reply is returned as a ``ResponseError``, not raised. It raises
        ``InvalidData`` if the bytes are not a Redis reply.
    """

    def __init__(self, longest: int = MAX_REPLY_LENGTH) -> None:
        self._longest = longest
        self._reader = hiredis.Reader(protocolError=InvalidData, replyError=_make_error)
        # It is hiredis' own method, except after a chunk that was fed in parts.
        self.gets: Callable[[], Any] = self._reader.gets
        self._replies: deque[Any] = deque()
        self._held = b""
        #: The numbers of bytes of a long string that are yet to be fed, and dropped.
        self._rest = (0, 0)

    def feed(self, data: bytes) -> None:
        """Add received bytes.

        :raises InvalidData: if they contain the header of an array that is too large,
            or the bytes before a possible header are not a Redis reply.
        """
        if self._held:
            data = self._held + data
            self._held = b""
        if any(self._rest):
            data = data[self._truncate(data, 0) :]
        if unfinished := _UNFINISHED.search(data, max(0, len(data) - 20)):
            self._held = data[unfinished.start() :]
            data = data[: unfinished.start()]
        if _LARGE.match(data) or _LARGE_IN_CHUNK.search(data):
            data = self._feed_up_to_headers(data)
        self._reader.feed(data)

    def _feed_up_to_headers(self, data: bytes) -> bytes:
        """Feed the data before the last possible header, and the start of long strings.

        :return: the remaining data.
        :raises InvalidData: if the data contains the header of an array that is too
            large, or the bytes before a possible header are not a Redis reply.
        """
        fed = start = 0
        self.gets = self._next
        while True:
            if header := _LARGE.match(data, start):
                self._reader.feed(data[fed:start])
                fed = start
                while (reply := self._reader.gets()) is not False:
                    self._replies.append(reply)
                if not self._reader.has_data():
                    if header[1] is None:
                        raise InvalidData(f"an array has more than {MAX_ITEMS} items")
                    if (length := int(header[1])) > self._longest:
                        self._reader.feed(b"$%d\r\n" % (self._longest + 1))
                        self._rest = self._longest + 1, length - self._longest - 1
                        fed = start = self._truncate(data, header.end())
            candidate = _LARGE_IN_CHUNK.search(data, start)
            if candidate is None:
                return data[fed:]
            start = candidate.start() + 1

    def _truncate(self, data: bytes, start: int) -> int:
        """Feed what a long string may have of the data, and drop the rest of it.

        :return: where the string's data ends.
        """
        kept, dropped = self._rest
        middle = min(start + kept, len(data))
        end = min(middle + dropped, len(data))
        self._reader.feed(data[start:middle])
        self._rest = kept - (middle - start), dropped - (end - middle)
        return end

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
