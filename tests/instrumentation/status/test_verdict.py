"""Tests for :mod:`synapse_replication.instrumentation.status.verdict`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import PeerHeartbeat
from synapse_replication.instrumentation.status.model import Condition, StallReason
from synapse_replication.instrumentation.status.records import (
    HearingRecord,
    PeerRecord,
    WriterRecord,
)
from synapse_replication.instrumentation.status.verdict import (
    RULES,
    Diagnosis,
    WriterFacts,
    diagnose,
    is_gone,
)
from synapse_replication.streams.reader_table import State

#: A writer whose rows are all delivered, and that was heard a moment ago.
HEARD = WriterRecord(
    since=0.0,
    progress_at=990.0,
    announced_at=1.0,
    link="redis",
    position=100,
    announced=100,
)
LIVE = WriterFacts(
    instance_name="w1",
    record=HEARD,
    hearing=HearingRecord(True, 0.0),
    state=State.LIVE,
)
NOW = 1000.0


def seen(at: float, *, is_leaving: bool = False, **more: Any) -> PeerRecord:
    """Return a peer whose last heartbeat or goodbye arrived at some time."""
    return PeerRecord(PeerHeartbeat("w1", "e", "", "", is_leaving, {}), at, **more)


def about(lag: int = 0, written_at: float | None = None, **changes: Any) -> Diagnosis:
    """Return the verdict about a live writer with some changes."""
    recorded = {name: changes.pop(name) for name in [*changes] if hasattr(HEARD, name)}
    record = replace(HEARD, announced=100 + lag, **recorded)
    if written_at is not None:
        record.undelivered = [(100 + lag, written_at)]
    return diagnose(replace(LIVE, record=record, **changes), NOW)


class DiagnoseTests(SynchronousTestCase):
    def check(
        self,
        condition: Condition | StallReason,
        since: float | None = None,
        **changes: Any,
    ) -> None:
        """Check the verdict about a live writer with some changes."""
        found = about(**changes)
        if isinstance(condition, Condition):
            self.assertEqual((found.condition, found.reason), (condition, None))
        else:
            self.assertEqual(
                (found.condition, found.reason), (Condition.STALLED, condition)
            )
        if since is not None:
            self.assertEqual(found.since, since)

    def test_conditions(self) -> None:
        """Without a problem, the reader's state determines the condition."""
        recent: dict[str, Any] = {"missing_since": 995.0, "fetching_since": 995.0}
        for state, condition in (
            (State.LIVE, Condition.LIVE),
            (State.DUE, Condition.CATCHING_UP),
            (State.FETCHING, Condition.CATCHING_UP),
            (State.DELIVERING, Condition.CATCHING_UP),
            (State.PAUSED, Condition.CATCHING_UP),
        ):
            self.check(condition, state=state, **recent)
        self.check(Condition.WAITING, state=State.WAITING, waiting_since=995.0)
        self.check(Condition.DRAINING, state=State.FETCHING, is_removed=True, **recent)
        self.check(Condition.LIVE, lag=5, written_at=999.0)
        self.check(Condition.CATCHING_UP, lag=5, written_at=995.0)

    def test_each_rule(self) -> None:
        """Each rule applies to the facts that it names, and only if they last."""
        leaving = seen(980.0, is_leaving=True, heard_at=979.0)
        for reason, since, changes in (
            (StallReason.NO_LINK, 980.0, {"hearing": HearingRecord(False, 980.0)}),
            (
                StallReason.NO_LINK,
                980.0,
                {"state": State.WAITING, "link_down_since": 980.0},
            ),
            (StallReason.WRITER_GONE, 980.0, {"peer": leaving}),
            (StallReason.WRITER_GONE, 984.0, {"peer": seen(984.0)}),
            (
                StallReason.AHEAD_OF_WRITER,
                980.0,
                {"behind_us": 90, "behind_since": 980.0},
            ),
            (
                StallReason.CATCH_UP_FAILS,
                980.0,
                {
                    "state": State.PAUSED,
                    "problems": {StallReason.CATCH_UP_FAILS: (980.0, "")},
                },
            ),
            (
                StallReason.SOURCE_SILENT,
                980.0,
                {"state": State.FETCHING, "fetching_since": 980.0},
            ),
            (
                StallReason.NO_PROGRESS,
                980.0,
                {"lag": 1, "written_at": 980.0, "progress_at": 970.0},
            ),
            (
                StallReason.NO_PROGRESS,
                980.0,
                {"state": State.DELIVERING, "missing_since": 980.0, "progress_at": 0.0},
            ),
            (
                StallReason.NO_POSITION,
                980.0,
                {"state": State.WAITING, "waiting_since": 980.0},
            ),
        ):
            self.check(reason, since, **changes)
        for reason in (
            StallReason.UNDECLARED_WRITER,
            StallReason.DATABASE_SET_BACK,
            StallReason.ROWS_LOST,
            StallReason.ROWS_SKIPPED,
        ):
            self.check(reason, 999.0, problems={reason: (999.0, "")})
        reason = StallReason.DATABASE_BEHIND
        self.check(reason, 998.0, problems={reason: (998.0, "")})
        self.check(Condition.LIVE, problems={reason: (998.1, "")})
        immediate = {rule.reason for rule in RULES if rule.is_immediate}
        self.assertEqual(
            immediate,
            {
                StallReason.DATABASE_BEHIND,
                StallReason.DATABASE_SET_BACK,
                StallReason.UNDECLARED_WRITER,
                StallReason.ROWS_LOST,
                StallReason.ROWS_SKIPPED,
            },
        )
        self.assertEqual({rule.reason for rule in RULES}, set(StallReason))

    def test_back_without_this_package(self) -> None:
        """A writer that said goodbye and announces itself again is not gone."""
        for heard_at in (980.1, 999.0):
            peer = seen(980.0, is_leaving=True, heard_at=heard_at)
            self.check(Condition.LIVE, peer=peer)
        self.check(
            StallReason.WRITER_GONE,
            peer=seen(980.0, is_leaving=True, heard_at=980.0),
        )

    def test_killed_and_back_without_this_package(self) -> None:
        """A writer that sent no goodbye and is heard long after its last heartbeat."""
        self.check(Condition.LIVE, peer=seen(980.0, heard_at=987.0))
        # Its last row may have followed its last heartbeat.
        self.check(StallReason.WRITER_GONE, peer=seen(980.0, heard_at=984.0))

    def test_replaced_while_the_link_was_down(self) -> None:
        """A writer that answers on a new link without a heartbeat is not gone."""
        peer = seen(900.0, heard_at=980.1)
        self.check(Condition.LIVE, peer=peer, hearing=HearingRecord(True, 980.0))
        peer = seen(900.0, heard_at=899.0)
        self.check(
            StallReason.WRITER_GONE, peer=peer, hearing=HearingRecord(True, 980.0)
        )

    def test_position_arrived(self) -> None:
        """A writer whose POSITION arrived is not said to be silent."""
        waiting: dict[str, Any] = {"state": State.WAITING, "waiting_since": 900.0}
        self.check(Condition.WAITING, announced_at=995.0, **waiting)
        found = about(announced_at=980.0, **waiting)
        self.assertEqual(found.reason, StallReason.NO_PROGRESS)
        self.assertIn("its POSITION arrived", found.detail)

    def test_own_subscription_is_down(self) -> None:
        """A process that hears nothing says nothing about others but that."""
        everything: dict[str, Any] = {
            "state": State.FETCHING,
            "peer": seen(0.0, is_leaving=True),
            "behind_us": 1,
            "problems": {
                StallReason.UNDECLARED_WRITER: (0.0, ""),
                StallReason.ROWS_SKIPPED: (0.0, ""),
                StallReason.CATCH_UP_FAILS: (0.0, ""),
            },
            "lag": 5,
            "written_at": 0.0,
            "progress_at": 0.0,
        }
        deaf = HearingRecord(False, 995.0)
        self.check(Condition.WAITING, hearing=deaf, **everything)
        deaf = HearingRecord(False, 980.0)
        found = about(hearing=deaf, deaf_detail="redis: refused", **everything)
        self.assertEqual(
            found,
            Diagnosis(Condition.STALLED, StallReason.NO_LINK, 980.0, "redis: refused"),
        )

    def test_dead_link(self) -> None:
        """If everybody is silent, the link is suspect, and not each writer."""
        peer = seen(984.0)
        self.check(StallReason.NO_LINK, 984.0, peer=peer, silence_since=984.0)
        self.check(StallReason.WRITER_GONE, peer=peer, silence_since=995.0)

    def test_link_dies_after_a_heartbeat(self) -> None:
        """
        A writer is not gone because others were heard for some seconds longer before
        the link died.
        """
        peer = seen(984.0)
        self.check(Condition.LIVE, peer=peer, silence_since=987.0)
        self.check(Condition.LIVE, peer=peer, silence_since=993.9)

    def test_rows_written_during_an_outage(self) -> None:
        """The sink has as long as always to handle rows once they can arrive."""
        written: dict[str, Any] = {"lag": 5, "written_at": 900.0, "progress_at": 890.0}
        self.check(Condition.CATCHING_UP, hearing=HearingRecord(True, 998.4), **written)
        self.check(
            StallReason.NO_PROGRESS,
            989.0,
            hearing=HearingRecord(True, 989.0),
            **written,
        )

    def test_request_before_an_outage(self) -> None:
        """A source has as long as always to answer once it can be heard."""
        asked: dict[str, Any] = {
            "state": State.FETCHING,
            "fetching_since": 900.0,
            "progress_at": 998.4,
        }
        self.check(Condition.CATCHING_UP, hearing=HearingRecord(True, 998.4), **asked)
        self.check(
            StallReason.SOURCE_SILENT,
            989.0,
            hearing=HearingRecord(True, 989.0),
            **asked,
        )

    def test_removed_writer(self) -> None:
        """The process of a removed writer need not run."""
        leaving = seen(980.0, is_leaving=True)
        self.check(Condition.DRAINING, peer=leaving, is_removed=True)

    def test_alive_without_position(self) -> None:
        """A writer that is heard in other streams is not asked for its start."""
        found = about(
            state=State.WAITING,
            waiting_since=980.0,
            process_heard_at=999.0,
        )
        self.assertEqual(found.detail, "w1 runs, but has not announced its position")

    def test_silence(self) -> None:
        """Silence counts from the last heartbeat, or from the start of hearing."""
        for heartbeat_at, hearing_since, expected in (
            (984.9, 0.0, True),
            (985.1, 0.0, False),
            (900.0, 984.9, True),
            (900.0, 985.1, False),
        ):
            found = is_gone(seen(heartbeat_at), hearing_since, NOW)
            self.assertIs(found, expected)


#: When each rule applies.
TABLE = """
* - ``no_link``
  - This process has no link.
* - ``no_link``
  - The link on which the writer was last heard is down, and the writer has
    announced its position on no other.
* - ``no_link``
  - Several processes send heartbeats more often than every 15 s (each writer does,
    among at most ten peers), and nothing has arrived for 15 s.
* - ``writer_gone``
  - The writer's process said goodbye and gave no sign of life since, or its
    heartbeats ceased: three intervals ago, at least 15 s, or its watchers say so.
* - ``ahead_of_writer``
  - The writer reports a position below the one of this process.
* - ``database_set_back``
  - The database was set back, and this process had delivered later rows.
* - ``undeclared_writer``
  - Rows of a writer that the configuration does not name were discarded.
* - ``rows_lost``
  - Rows are not in their writer's memory any more.
* - ``rows_skipped``
  - The source returned rows that cannot be decoded, and they were skipped.
* - ``database_behind``
  - The database is a standby, and has lacked announced rows for 2 s.
* - ``catch_up_fails``
  - Fetching or delivering missing rows fails.
* - ``source_silent``
  - Missing rows were requested, and their source has not answered.
* - ``no_progress``
  - Rows or a position arrived, or could have been fetched, and nothing was
    delivered since.
* - ``no_position``
  - A link is up, and the writer has not announced its position on it.
"""


class ManualTests(SynchronousTestCase):
    def test_table(self) -> None:
        """The runbook contains the rules, in their order."""
        docs = Path(__file__).parents[3] / "docs"
        text = " ".join((docs / "runbook.rst").read_text().split())
        self.assertIn(" ".join(TABLE.split()), text)
        reasons = [rule.reason.value for rule in RULES]
        self.assertEqual(re.findall("``(.*)``", TABLE), reasons)
