"""Tests of reading Redis's replies and of encoding commands."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import hiredis
import txredisapi
from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from synapse_replication.redis.resp import (
    MAX_ERROR_LENGTH,
    ReplyParser,
    encode,
    encode_publishes,
)

_SIMPLE = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=20),
)
_REPLIES = st.lists(st.one_of(_SIMPLE, st.lists(_SIMPLE, max_size=4)), max_size=5)


def write(reply: Any) -> bytes:
    """Encode a reply as Redis does."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(write, reply))


def memory() -> int:
    """Return the resident memory of this process, in bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def read(reader: ReplyParser, chunks: list[bytes]) -> list[Any]:
    """Decode replies that arrive in chunks."""
    replies = []
    for chunk in chunks:
        reader.feed(chunk)
        while (reply := reader.gets()) is not False:
            replies.append(reply)
    return replies


class ReaderTests(SynchronousTestCase):
    """Tests for :class:`ReplyParser`."""

    @settings(derandomize=True, deadline=None, max_examples=100)
    @given(_REPLIES, st.integers(1, 7))
    def test_round_trip(self, replies: list[Any], size: int) -> None:
        """Replies are decoded however they are split into chunks."""
        data = b"".join(map(write, replies))
        chunks = [data[i : i + size] for i in range(0, len(data), size)]
        self.assertEqual(read(ReplyParser(), chunks), replies)

    def test_every_split(self) -> None:
        """A reply may be split at any byte."""
        data = b"+OK\r\n*3\r\n$7\r\nmessage\r\n$2\r\nhs\r\n$4\r\na\r\nb\r\n:7\r\n"
        expected = [b"OK", [b"message", b"hs", b"a\r\nb"], 7]
        for at in range(len(data)):
            self.assertEqual(read(ReplyParser(), [data[:at], data[at:]]), expected)

    def test_error(self) -> None:
        """An error reply is returned, not raised."""
        (reply,) = read(ReplyParser(), [b"-NOAUTH no\r\n"])
        self.assertIsInstance(reply, txredisapi.ResponseError)
        self.assertEqual(str(reply), "NOAUTH no")

    def test_null_array(self) -> None:
        """A null array is decoded to ``None``."""
        self.assertEqual(read(ReplyParser(), [b"*-1\r\n"]), [None])

    def test_nonsense(self) -> None:
        """Invalid data raises ``InvalidData``."""
        for data in (
            b"HTTP/1.1 400 Bad\r\n",
            b":x\r\n",
            b"$1x\r\n",
            b"$" + b"9" * 5000 + b"\r\n",
            b"*" * 99 + b"\r\n",
        ):
            with self.assertRaises(txredisapi.InvalidData):
                read(ReplyParser(), [data])

    def test_depth(self) -> None:
        """Arrays that are nested too deeply are refused."""
        if tuple(map(int, hiredis.__version__.split(".")[:2])) < (3, 5):
            raise SkipTest("this hiredis does not limit the depth")
        with self.assertRaises(txredisapi.InvalidData):
            read(ReplyParser(), [b"*1\r\n" * 5000])

    @settings(derandomize=True, deadline=None, max_examples=30)
    @given(
        st.lists(
            st.sampled_from(
                [
                    b"x" * 20,
                    b"x" * 1_000_000,
                    b"x" * 1_000_001,
                    b"\r\n$7777777\r\n*99999\r\n" * 60_000,
                    b"\n$1234567\r\n",
                ]
            ),
            max_size=4,
        ),
        st.integers(50_000, 300_000),
    )
    def test_long_strings(self, texts: list[bytes], size: int) -> None:
        """A string beyond the limit is truncated, and others are returned whole."""
        messages = [[b"message", b"hs", text] for text in texts]
        data = b"".join(map(write, [*messages, 7]))
        chunks = [data[i : i + size] for i in range(0, len(data), size)]
        *found, last = read(ReplyParser(10**6), chunks)
        self.assertEqual(last, 7)
        self.assertEqual(
            found, [[*message, text[: 10**6 + 1]] for *message, text in messages]
        )

    def test_long_string_in_small_chunks(self) -> None:
        """The header of a long string, and its end, may be split at any byte."""
        text = b"x" * 1_000_002
        data = write([b"message", b"hs", text]) + b"+OK\r\n"
        begin, end = data.index(text), data.index(text) + len(text)
        for at in (*range(begin), *range(end - 3, len(data))):
            reader = ReplyParser(10**6)
            self.assertEqual(
                read(reader, [data[:at], data[at:]]),
                [[b"message", b"hs", text[:-1]], b"OK"],
            )

    def test_long_string_is_not_stored(self) -> None:
        """Only the permitted part of a long string is stored while it arrives."""
        reader = ReplyParser(10**6)
        reader.feed(b"$15000000\r\n")
        before = memory()
        for _ in range(228):
            reader.feed(b"x" * 65536)
        self.assertLess(memory() - before, 5_000_000)

    def test_long_error(self) -> None:
        """The text of an error reply is bounded: it becomes a part of log lines."""
        parser = ReplyParser()
        parser.feed(b"-ERR " + b"x" * 100_000 + b"\r\n-ERR busy\r\n")
        error = parser.gets()
        self.assertIsInstance(error, txredisapi.ResponseError)
        self.assertEqual(str(error), f"ERR {'x' * (MAX_ERROR_LENGTH - 4)}...")
        self.assertEqual(str(parser.gets()), "ERR busy")


class EncodeTests(SynchronousTestCase):
    """Tests for :func:`encode` and :func:`encode_publishes`."""

    def test_command(self) -> None:
        """Lengths are in bytes."""
        self.assertEqual(
            encode(b"SET", "ä".encode(), b""),
            b"*3\r\n$3\r\nSET\r\n$2\r\n\xc3\xa4\r\n$0\r\n\r\n",
        )

    def test_publishes(self) -> None:
        """Encoding several publishes together equals encoding each."""
        self.assertEqual(
            encode_publishes(b"hs", [b"a", b"\r\n"]),
            [encode(b"PUBLISH", b"hs", b"a"), encode(b"PUBLISH", b"hs", b"\r\n")],
        )

    def test_too_many_items(self) -> None:
        """An array that is too long is refused at its header, however it is split."""
        good = write([b"message", b"hs", b"*2147483647 {*99999}"])
        for kind in b"*%~>":
            header = b"%c2147483647\r\n" % kind
            for data in (header, good + header, good * 1000 + header):
                for size in (1, 5, 100_000):
                    if size == 1 and len(data) > 1000:
                        continue
                    chunks = [data[i : i + size] for i in range(0, len(data), size)]
                    with self.assertRaises(txredisapi.InvalidData):
                        read(ReplyParser(), chunks)
        self.assertEqual(len(read(ReplyParser(), [good * 3])), 3)
