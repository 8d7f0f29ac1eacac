"""Tests that invalid input among valid lines neither loses a row nor leaks a secret."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import RowDecodeError
from synapse_replication.wire.commands import COMMANDS
from synapse_replication.wire.rdata import RefusedLine, read_lines
from tests.handlers.fixtures import receiving

_TOKEN = "syt_bm9ib2R5"
#: Valid and invalid JSON that is not a row of the stream.
_BAD_ROWS = st.sampled_from(
    [
        b"",
        b"nul",
        b"NaN",
        b"[NaN]",
        b"[1e999]",
        b"[Infinity]",
        b"[18446744073709551616]",
        b"[" + b"9" * 5000 + b"]",
        b"[" * 20_000,
        b"[" * 20_000 + b"]" * 20_000,
        b'["\\ud800"]',
        b'["\\udc00\\ud800"]',
        b'["\xff"]',
        b'["\x00"]',
        b'["a"',
        b'["a"]]',
        b'["a"] 1',
        b"{}",
        b"null",
        b"[]",
        b"[[]]",
    ]
)
_WORDS = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b"events", b"evil", b"batch", b"9" * 40, b"-1", b"1.5", b"\x00", b"start", b""]
    ),
)
#: All commands with arbitrary arguments. RDATA and POSITION are only sent in the name
#: of another writer: valid ones of ``w`` would be handled.
_COMMANDS = st.tuples(
    st.sampled_from(sorted({*COMMANDS, "UNKNOWN"} - {"RDATA", "POSITION"})),
    st.lists(_WORDS, max_size=6),
).map(lambda parts: b" ".join([parts[0].encode(), *parts[1]]))
_OF_ANOTHER_WRITER = st.tuples(
    st.sampled_from([b"RDATA", b"POSITION"]),
    st.sampled_from([b"events", b"unknown", b"\xff"]),
    st.lists(_WORDS, max_size=3),
).map(lambda parts: b" ".join([parts[0], parts[1], b"evil", *parts[2]]))
_WITH_ACCESS_TOKEN = _WORDS.map(
    lambda word: b'USER_IP @a:b ["%b",%b]' % (_TOKEN.encode(), word)
)
_HOSTILE = st.one_of(
    st.binary(max_size=50).filter(
        lambda line: not line.startswith((b"RDATA", b"POSITION"))
    ),
    _COMMANDS,
    _OF_ANOTHER_WRITER,
    _WITH_ACCESS_TOKEN,
    _BAD_ROWS.map(lambda row: (b"bad row", row)),
)


class HostileTests(SynchronousTestCase):
    """
    Tests that rows of a correct writer arrive in order among arbitrary other lines.
    """

    @settings(derandomize=True, deadline=None, max_examples=300)
    @given(st.lists(_HOSTILE | st.none(), max_size=30), st.integers(1, 5))
    def test_no_good_line_is_lost(
        self, plan: list[bytes | tuple[bytes, bytes] | None], chunk: int
    ) -> None:
        """Each valid row is delivered once; errors are reported without secrets."""
        process = receiving()
        lines = [b"POSITION events w 0 0"]
        token = 0
        for step in plan:
            if isinstance(step, bytes):
                lines.append(step)
                continue
            token += 1
            process.stream.persist("w", token, [f"row {token}"])
            text = b'["row %d"]' % token if step is None else step[1]
            lines.append(b"RDATA events w %d %b" % (token, text))
        lines.append(b"POSITION events w %d %d" % (token, token))
        for start in range(0, len(lines), chunk):
            process.handler.received(
                process.connection, read_lines(lines[start : start + chunk])
            )
            process.run_pending_calls()
        process.host.reactor.pump([1.0] * 60)
        self.assertEqual(
            [row for row in process.texts() if row[0] == "w"],
            [("w", n, [f"row {n}"]) for n in range(1, token + 1)],
        )
        observer = process.host.observer
        for what, error in observer.failures:
            self.assertIsInstance(error, RowDecodeError, what)
            self.assertNotIn(_TOKEN, f"{what} {error}")
        for message in process.connection.closed_with:
            self.assertNotIn(_TOKEN, message)
            self.assertLess(len(message), 1000)

    @settings(derandomize=True, deadline=None, max_examples=300)
    @given(st.lists(_WORDS, max_size=8), st.booleans())
    def test_access_tokens_do_not_show(self, words: list[bytes], quoted: bool) -> None:
        """No error about a malformed USER_IP line contains its access token."""
        token = b'["%b",' % _TOKEN.encode() if quoted else _TOKEN.encode()
        line = b" ".join([b"USER_IP", b"@a:b", token, *words])
        for item in read_lines([line]):
            if isinstance(item, RefusedLine):
                self.assertNotIn(_TOKEN, f"{item.error} {item.error!r} {item!r}")
            else:
                self.assertNotIn(_TOKEN, repr(item))
