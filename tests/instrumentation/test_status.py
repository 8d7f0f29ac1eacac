"""Tests for :mod:`synapse_replication.instrumentation.status`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import StatusError
from synapse_replication.instrumentation.status import (
    Condition,
    DuplicateStatus,
    LinkStatus,
    MemberStatus,
    ProcessStatus,
    StallReason,
    WriterStatus,
    decode_status,
    describe_writer,
    encode_status,
)

STALLED = WriterStatus(
    "events",
    "w1",
    Condition.STALLED,
    10,
    30,
    20,
    12.5,
    reason=StallReason.CATCH_UP_FAILS,
    stalled_for=31.0,
    detail="the database is away",
    history=(0, 5, 20),
)
LIVE = WriterStatus("typing", "w2", Condition.LIVE, 7, 7)
STATUS = ProcessStatus(
    "x.test",
    "me",
    "0.1.0",
    3600.0,
    (),
    (STALLED, LIVE),
    (LinkStatus("redis", 1, 60.0, "", 2, 300),),
    (MemberStatus("w1", "abc", "0.1.0", "host:1", 1.0, False),),
    (DuplicateStatus("w2", "host:2 and host:3", 4.0),),
)


class StatusTests(SynchronousTestCase):
    def test_round_trip(self) -> None:
        """What is written as JSON is read as it was."""
        self.assertEqual(decode_status(encode_status(STATUS)), STATUS)

    def test_no_status(self) -> None:
        """An answer that is something else is an error that says so."""
        for text in (b"", b"[]", b"{}", b"<html>", b'{"writers": 3}', b"\xff"):
            error = self.assertRaises(StatusError, decode_status, text)
            self.assertIn("not a status", str(error))

    def test_stalled(self) -> None:
        """The writers whose rows do not arrive are told apart."""
        self.assertEqual(STATUS.stalled, (STALLED,))

    def test_one_line(self) -> None:
        """A writer's line has what an operator asks next."""
        catching_up = WriterStatus(
            "events", "w1", Condition.CATCHING_UP, 12_134, 98_311, 86_177, 3.0, 100
        )
        lines = {
            describe_writer(
                STALLED
            ): "events/w1 stalled for 31 s: the database is away",
            describe_writer(LIVE): "typing/w2 live",
            describe_writer(catching_up): "events/w1 catching up, 12,034 of 98,211",
        }
        for line, expected in lines.items():
            self.assertEqual(line, expected)

    def test_behind_without_a_catch_up(self) -> None:
        """A writer whose rows wait in the queue is told by how many."""
        writer = WriterStatus("events", "w1", Condition.CATCHING_UP, 1, 2001, 2000)
        self.assertEqual(describe_writer(writer), "events/w1 catching up, 2,000 behind")
