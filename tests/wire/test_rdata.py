"""Tests of reading lines into groups of rows and commands, and of writing rows."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import UnknownCommandError, UnparsableLineError
from synapse_replication.wire.commands import PingCommand, PositionCommand
from synapse_replication.wire.rdata import (
    InterleavedGroup,
    RdataGroup,
    RefusedLine,
    rdata_lines,
    read_lines,
)
from tests.wire.lines import LINES


def rdata(stream: str, writer: str, token: int | None, row: bytes) -> bytes:
    return (
        f"RDATA {stream} {writer} {'batch' if token is None else token} ".encode() + row
    )


class ReadLinesTests(SynchronousTestCase):
    """Tests for :func:`read_lines`."""

    def test_rows_of_one_writer(self) -> None:
        """Rows of one writer become one group, and are not decoded."""
        lines = [
            rdata("events", "w1", None, b'["a b"]'),
            rdata("events", "w1", 5, b"[not looked at]"),
            rdata("events", "w1", -6, b""),
        ]
        self.assertEqual(
            read_lines(lines),
            [
                RdataGroup(
                    "events",
                    "w1",
                    [None, 5, -6],
                    [b'["a b"]', b"[not looked at]", b""],
                )
            ],
        )

    def test_rows_of_older_peers(self) -> None:
        """Rows without a writer are those of the main process."""
        self.assertEqual(
            read_lines(
                [
                    b"RDATA events batch [1]",
                    b'RDATA events 5 ["a b", 1]',
                    b"RDATA events 5 x",
                    b"RDATA events w 6 [2]",
                ]
            ),
            [
                RdataGroup("events", "master", [None], [b"[1]"]),
                RdataGroup("events", "master", [5], [b'["a b", 1]']),
                RdataGroup("events", "master", [5], [b"x"]),
                RdataGroup("events", "w", [6], [b"[2]"]),
            ],
        )

    def test_writers_keep_their_order(self) -> None:
        """Rows of several writers of a stream become one group, in order."""
        lines = [
            rdata("events", "w1", None, b"[1]"),
            rdata("events", "w2", None, b"[2]"),
            rdata("events", "w2", 8, b"[3]"),
            rdata("events", "w1", 7, b"[4]"),
        ]
        self.assertEqual(
            read_lines(lines),
            [
                InterleavedGroup(
                    "events",
                    ["w1", "w2", "w2", "w1"],
                    [None, None, 8, 7],
                    [b"[1]", b"[2]", b"[3]", b"[4]"],
                )
            ],
        )

    def test_interleaved_streams(self) -> None:
        """
        A stream with a single writer becomes a plain run, whatever groups other streams
        become.
        """
        lines = [
            rdata("events", "w1", 1, b"[1]"),
            rdata("caches", "w2", 1, b"[2]"),
            rdata("events", "w2", 2, b"[3]"),
            rdata("caches", "w2", 2, b"[4]"),
            rdata("events", "w1", 3, b"[5]"),
        ]
        self.assertEqual(
            read_lines(lines),
            [
                InterleavedGroup(
                    "events", ["w1", "w2", "w1"], [1, 2, 3], [b"[1]", b"[3]", b"[5]"]
                ),
                RdataGroup("caches", "w2", [1, 2], [b"[2]", b"[4]"]),
            ],
        )

    def test_parts_of_an_interleaved_group(self) -> None:
        """An interleaved run can be sliced, filtered and split by writer, in order."""
        group = InterleavedGroup(
            "s", ["a", "b", "b", "a"], [1, None, 2, 3], [b"1", b"2", b"3", b"4"]
        )
        b = RdataGroup("s", "b", [None, 2], [b"2", b"3"])
        self.assertEqual(
            list(group.groups()),
            [RdataGroup("s", "a", [1], [b"1"]), b, RdataGroup("s", "a", [3], [b"4"])],
        )
        self.assertEqual(list(group.without("a").groups()), [b])
        self.assertEqual(
            group.part(2, 9), InterleavedGroup("s", ["b", "a"], [2, 3], [b"3", b"4"])
        )

    def test_streams_are_gathered(self) -> None:
        """Rows of one stream are grouped across those of other streams."""
        lines = [
            rdata("events", "w1", 1, b"[1]"),
            rdata("caches", "w1", 1, b"[2]"),
            rdata("events", "w1", 2, b"[3]"),
            rdata("caches", "w1", 2, b"[4]"),
        ]
        self.assertEqual(
            read_lines(lines),
            [
                RdataGroup("events", "w1", [1, 2], [b"[1]", b"[3]"]),
                RdataGroup("caches", "w1", [1, 2], [b"[2]", b"[4]"]),
            ],
        )

    def test_command_ends_groups(self) -> None:
        """Rows are not grouped across another command or a refused line."""
        row = rdata("events", "w1", 1, b"[1]")
        group = RdataGroup("events", "w1", [1], [b"[1]"])
        position = PositionCommand("events", "w1", 1, 2)
        self.assertEqual(
            read_lines([row, b"POSITION events w1 1 2", row]), [group, position, group]
        )
        before, refused, after = read_lines([row, b"FROB", row])
        self.assertEqual([before, after], [group, group])
        self.assertIsInstance(refused, RefusedLine)
        before, refused, after = read_lines([row, b"RDATA events w1 x []", row])
        self.assertEqual([before, after], [group, group])

    def test_blank_lines(self) -> None:
        """Blank lines are skipped and do not end a group."""
        row = rdata("events", "w1", 1, b"[1]")
        self.assertEqual(
            read_lines([b"", row, b"", row, b""]),
            [RdataGroup("events", "w1", [1, 1], [b"[1]", b"[1]"])],
        )
        self.assertEqual(read_lines([]), [])

    def test_other_commands(self) -> None:
        """Every other command is decoded as a command."""
        for line, command in LINES.items():
            if command.NAME != "RDATA":
                self.assertEqual(read_lines([line.encode()]), [command])

    def test_refused(self) -> None:
        """A malformed line is refused at its position; the lines around it are read."""
        items = read_lines(
            [b"PING 1", b"FROB x", b"POSITION x", b"PING \xff", b"\xff", b"PING 2"]
        )
        self.assertEqual((items[0], items[-1]), (PingCommand("1"), PingCommand("2")))
        errors = [item.error for item in items if isinstance(item, RefusedLine)]
        self.assertEqual(
            [type(error) for error in errors],
            [
                UnknownCommandError,
                UnparsableLineError,
                UnparsableLineError,
                UnparsableLineError,
            ],
        )

    def test_refused_row_names_its_stream(self) -> None:
        """
        A refused row has the names of the stream and writer for which a row is missing.
        """
        for line in (
            b"RDATA events w1 x []",
            b"RDATA events w1 1_0 []",
            b"RDATA events w1 9223372036854775808 []",
            b"RDATA events w1 5",
            b"RDATA events w1",
            b"RDATA events w1 \xff []",
        ):
            [item] = read_lines([line])
            assert isinstance(item, RefusedLine)
            self.assertIsInstance(item.error, UnparsableLineError)
            self.assertEqual((item.stream_name, item.instance_name), ("events", "w1"))
        [item] = read_lines([b"RDATA events"])
        assert isinstance(item, RefusedLine)
        self.assertIsNone(item.stream_name)

    def test_names_that_are_no_text(self) -> None:
        """Names that are not UTF-8 are refused."""
        for line in (b"RDATA \xff w1 1 []", b"RDATA events \xff 1 []"):
            good = rdata("events", "w1", 1, b"[1]")
            group = RdataGroup("events", "w1", [1], [b"[1]"])
            before, *refused, after = read_lines([good, line, line, good])
            self.assertEqual([before, after], [group, group])
            self.assertEqual([type(item) for item in refused], [RefusedLine] * 2)
            # Such names are refused among rows of several writers as well.
            other = rdata("events", "w2", 2, b"[1]")
            both, refusal = read_lines([good, other, line])
            self.assertIsInstance(both, InterleavedGroup)
            self.assertIsInstance(refusal, RefusedLine)

    def test_empty_names(self) -> None:
        """A row with an empty stream or writer name is refused."""
        for line in (b"RDATA  w 1 []", b"RDATA s  1 []"):
            (item,) = read_lines([line])
            self.assertIsInstance(item, RefusedLine)

    def test_names_that_are_refused(self) -> None:
        """
        A row with a name that is too long or not printable is refused; the error names
        no writer.
        """
        for name in ("n" * 256, "a\x1b[2Jb", "a\u202eb"):
            for names in (("events", name), (name, "w1")):
                lines = [
                    rdata("events", "w1", 1, b"[]"),
                    rdata(*names, 2, b"[]"),
                    rdata("events", "w1", 3, b"[]"),
                ]
                first, refused, last = read_lines(lines)
                assert isinstance(refused, RefusedLine)
                self.assertIsNone(refused.instance_name)
                self.assertNotIn(name, str(refused.error))
                self.assertEqual(first, RdataGroup("events", "w1", [1], [b"[]"]))
                self.assertEqual(last, RdataGroup("events", "w1", [3], [b"[]"]))

    def test_refusals_hold_no_line(self) -> None:
        """The error of a refused line references no frame that contains the line."""
        for line in (b"POSITION events " + b"n" * 300 + b" 1 2", b"X", b"\xff"):
            (item,) = read_lines([line])
            assert isinstance(item, RefusedLine)
            self.assertIsNone(item.error.__traceback__)
            self.assertIsNone(item.error.__context__)

    def test_greatest_tokens(self) -> None:
        """All 64-bit tokens are read."""
        for token in (2**63 - 1, -(2**63), 10**18, 10**18 - 1, -1, 0):
            self.assertEqual(
                read_lines([rdata("s", "w", token, b"[]")]),
                [RdataGroup("s", "w", [token], [b"[]"])],
            )

    @settings(derandomize=True, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from("st"),
                st.sampled_from("vw"),
                st.none() | st.integers(0, 9),
            )
            | st.sampled_from([b"PING 1", b"", b"FROB", b"RDATA s v x []"])
        )
    )
    def test_order(self, plan: list[tuple[str, str, int | None] | bytes]) -> None:
        """Rows of a stream keep their order relative to each other and to commands."""
        lines = [
            one if isinstance(one, bytes) else rdata(*one, b"[%d]" % index)
            for index, one in enumerate(plan)
        ]
        seen: list[tuple[str, str, int | None, int, int]] = []
        others = 0
        for item in read_lines(lines):
            if isinstance(item, (RdataGroup, InterleavedGroup)):
                groups = [item] if isinstance(item, RdataGroup) else item.groups()
                for group in groups:
                    for token, row in zip(group.tokens, group.rows, strict=True):
                        index = int(row[1:-1])
                        seen.append(
                            (
                                group.stream_name,
                                group.instance_name,
                                token,
                                index,
                                others,
                            )
                        )
            else:
                others += 1
        expected = []
        others = 0
        for index, one in enumerate(plan):
            if isinstance(one, tuple):
                expected.append((*one, index, others))
            elif one:
                others += 1
        for stream in "st":
            self.assertEqual(
                [row for row in seen if row[0] == stream],
                [row for row in expected if row[0] == stream],
            )

    @settings(derandomize=True, deadline=None)
    @given(st.lists(st.binary()))
    def test_never_raises(self, lines: list[bytes]) -> None:
        """No received lines cause an exception."""
        read_lines(lines)
        read_lines([b"RDATA " + line for line in lines])


class RdataLinesTests(SynchronousTestCase):
    """Tests for :func:`rdata_lines`."""

    def test_batches(self) -> None:
        """All rows of a token but the last are marked ``batch``."""
        self.assertEqual(
            rdata_lines(
                "events", "w1", [(5, [b"[1]"]), (-6, [b"[2]", b"[3]", b"[4]"])]
            ),
            [
                b"RDATA events w1 5 [1]",
                b"RDATA events w1 batch [2]",
                b"RDATA events w1 batch [3]",
                b"RDATA events w1 -6 [4]",
            ],
        )

    @settings(derandomize=True, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.integers(-(2**63), 2**63 - 1),
                st.lists(st.binary().filter(lambda row: b"\n" not in row), min_size=1),
            ),
            min_size=1,
        )
    )
    def test_round_trip(self, batches: list[tuple[int, list[bytes]]]) -> None:
        """Written rows are read as the same rows and tokens."""
        [group] = read_lines(rdata_lines("events", "w1", batches))
        assert isinstance(group, RdataGroup)
        self.assertEqual(group.rows, [row for _, rows in batches for row in rows])
        self.assertEqual(
            group.tokens,
            [t for token, rows in batches for t in [None] * (len(rows) - 1) + [token]],
        )
