"""Tests that the status is good only if every known row was delivered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.status_page import judge
from synapse_replication.errors import RowsLostError
from synapse_replication.handlers.accepted_writers import DeclaredWriters
from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.events import DiscardReason
from synapse_replication.handlers.observer import CompositeObserver
from synapse_replication.instrumentation.status.model import StallReason
from synapse_replication.instrumentation.status.status_observer import (
    NO_SOURCES,
    StatusObserver,
)
from synapse_replication.testing.doubles import (
    MemoryConnection,
    SourceStream,
    receive_lines,
)
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost

RUNBOOK = Path(__file__).parents[3] / "docs" / "runbook.rst"

#: The status after a discard: good at once; busy, and good as soon as the rows
#: were fetched; or stalled.
GOOD, BUSY = "good", "busy"
_Expected: TypeAlias = str | StallReason

CASES: dict[DiscardReason, tuple[Callable[[DiscardTests], None], _Expected]] = {}


def case(
    reason: DiscardReason, expected: _Expected
) -> Callable[[Callable[[DiscardTests], None]], Callable[[DiscardTests], None]]:
    def add(func: Callable[[DiscardTests], None]) -> Callable[[DiscardTests], None]:
        CASES[reason] = func, expected
        return func

    return add


class DiscardTests(SynchronousTestCase):
    """A reader that is live at 5 of ``events`` of ``w``."""

    def setUp(self) -> None:
        self.stream = SourceStream("events", Row)
        self.host = RecordingHost(self.stream)
        self.status = StatusObserver(
            "x.test",
            "reader",
            [("events", "w")],
            monotonic=self.host.clock.seconds,
        )
        self.recorded = self.host.observer
        self.handler = ReplicationCommandHandler(
            self.host,
            CompositeObserver([self.status, self.recorded]),
            options=HandlerOptions(writers=DeclaredWriters({"events": ["w"]})),
        )
        self.status.connect(attrs.evolve(NO_SOURCES, readers=self.handler.readers))
        self.links = [self.connect("one")]
        self.stream.persist("w", 5, ["five"])
        self.receive("POSITION events w 5 5")
        self.assertEqual(self.tone(), GOOD)

    def connect(self, name: str) -> MemoryConnection:
        connection = MemoryConnection(name)
        self.handler.new_connection(connection)
        return connection

    def receive(self, *lines: str, link: int = 0) -> None:
        receive_lines(self.handler, self.links[link], *lines)
        self.host.reactor.advance(0)

    def tone(self) -> str:
        return judge(self.status.snapshot()).tone

    def stalls(self) -> set[StallReason | None]:
        return {writer.reason for writer in self.status.snapshot().stalled}

    def delivered(self) -> list[int]:
        return self.host.rows.tokens("w")

    def check(self, reason: DiscardReason) -> None:
        provoke, expected = CASES[reason]
        provoke(self)
        counted = sum(
            count
            for (*_, why), count in self.recorded.discards.items()
            if why is reason
        )
        self.assertGreater(counted, 0, reason)
        if isinstance(expected, StallReason):
            self.assertEqual(self.stalls(), {expected})
            self.host.reactor.advance(600)
            self.assertIn(expected, self.stalls())
            return
        self.assertEqual(self.tone(), expected, reason)
        if expected == BUSY:
            self.stream.is_held = False
            while self.stream.waiting:
                self.stream.answer()
            self.receive("POSITION events w 6 6")
            self.host.reactor.pump([1.0] * 3)
        self.assertEqual(self.tone(), GOOD)
        rows = [token for token, _ in self.stream._rows["w"]]
        self.assertEqual(sorted({*self.delivered()}), sorted({*rows}))

    def test_every_reason(self) -> None:
        """There is a case for every reason, and a row of the table in the runbook."""
        self.assertEqual(CASES.keys(), set(DiscardReason))
        text = RUNBOOK.read_text().partition(".. _discard-reasons:")[2]
        shown = re.findall(r"\* - ``(\w+)``\n     - (\w+)", text)
        expected = []
        for reason, (_, status) in CASES.items():
            word = status.value if isinstance(status, StallReason) else status
            expected.append((reason.value, word))
        self.assertEqual(sorted(shown), sorted(expected))


def _add_tests() -> None:
    for reason in DiscardReason:

        def test(self: DiscardTests, reason: DiscardReason = reason) -> None:
            self.check(reason)

        test.__doc__ = f"After {reason.value}, the status is as the runbook says."
        setattr(DiscardTests, f"test_{reason.value}", test)


@case(DiscardReason.UNKNOWN_STREAM, GOOD)
def _unknown_stream(test: DiscardTests) -> None:
    test.receive('RDATA newer w 6 ["a"]')


@case(DiscardReason.UNDECLARED_WRITER, StallReason.UNDECLARED_WRITER)
def _undeclared_writer(test: DiscardTests) -> None:
    test.receive('RDATA events another 6 ["a"]')


@case(DiscardReason.NOT_CONNECTED, BUSY)
def _not_connected(test: DiscardTests) -> None:
    test.handler.lost_connection(test.links[0])
    test.links[0] = test.connect("one")
    test.stream.persist("w", 6, ["six"])
    test.receive('RDATA events w 6 ["six"]')


@case(DiscardReason.OWN_ECHO, GOOD)
def _own_echo(test: DiscardTests) -> None:
    test.receive('RDATA events reader 6 ["six"]')


@case(DiscardReason.OLD_TOKEN, GOOD)
def _old_token(test: DiscardTests) -> None:
    test.receive('RDATA events w 5 ["five"]')


@case(DiscardReason.REDUNDANT_POSITION, GOOD)
def _redundant_position(test: DiscardTests) -> None:
    test.receive("POSITION events w 5 5")


@case(DiscardReason.SUPERSEDED_BY_POSITION, GOOD)
def _superseded(test: DiscardTests) -> None:
    test.stream.persist("w", 7, ["a"], ["b"])
    test.receive('RDATA events w batch ["a"]', "POSITION events w 5 6")
    test.receive('RDATA events w 7 ["b"]')


@case(DiscardReason.UNDECODABLE, BUSY)
def _undecodable(test: DiscardTests) -> None:
    test.stream.is_held = True
    test.stream.persist("w", 6, ["six"])
    test.receive("RDATA events w 6 nonsense")


@case(DiscardReason.UNPARSABLE, BUSY)
def _unparsable(test: DiscardTests) -> None:
    test.stream.persist("w", 6, ["six"])
    test.receive('RDATA events w 6x ["six"]')


@case(DiscardReason.SKIPPED, StallReason.ROWS_SKIPPED)
def _skipped(test: DiscardTests) -> None:
    test.stream.persist("w", 6, [6])
    test.receive("RDATA events w 6 [6]")


@case(DiscardReason.LOST, StallReason.ROWS_LOST)
def _lost(test: DiscardTests) -> None:
    test.stream.is_held = True
    test.stream.persist("w", 9, ["nine"])
    test.receive("POSITION events w 9 9")
    test.stream.fail(RowsLostError("rows are not in memory any more", 8))
    test.stream.answer()
    test.host.reactor.advance(0)
    test.assertEqual(test.delivered(), [5, 9])


@case(DiscardReason.CATCHING_UP, BUSY)
def _catching_up(test: DiscardTests) -> None:
    test.stream.is_held = True
    test.stream.page_rows = 1
    test.stream.persist("w", 6, ["six"])
    test.stream.persist("w", 7, ["seven"])
    test.stream.persist("w", 8, ["eight"])
    test.receive("POSITION events w 7 7", 'RDATA events w 8 ["eight"]')
    test.stream.answer()
    test.host.reactor.advance(0)


@case(DiscardReason.HANDLER_FAILED, BUSY)
def _handler_failed(test: DiscardTests) -> None:
    test.stream.persist("w", 6, ["six"])
    test.host.rows.failures.append(ValueError("no"))
    test.receive('RDATA events w 6 ["six"]')


@case(DiscardReason.IMPLAUSIBLE, GOOD)
def _implausible(test: DiscardTests) -> None:
    test.stream.last_token = 5
    test.receive("POSITION events w 200000 200000")


@case(DiscardReason.NOT_RESPONSIBLE, GOOD)
def _not_responsible(test: DiscardTests) -> None:
    test.receive('USER_IP @a:b ["secret","1.2.3.4","agent",null,6]')


@case(DiscardReason.REPEATED, GOOD)
def _repeated(test: DiscardTests) -> None:
    test.receive("USER_SYNC i @a:b D start 5", "USER_SYNC i @a:b D start 5")


_add_tests()
