"""The verdict about one writer: a pure function of what is known of it and the time.

Theory of operation: :class:`WriterFacts` holds everything that a process knows of one
writer of one stream at one moment. :data:`RULES` lists, in order, why rows may not
arrive; a cause comes before its consequences. The first rule that has applied for long
enough makes the writer *stalled*. docs/runbook.rst contains the same table.

A process that has no link hears nothing, so it says nothing about others but that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from synapse_replication.handlers.epochs import USUAL_INTERVAL
from synapse_replication.instrumentation.status import records
from synapse_replication.instrumentation.status.model import Condition, StallReason
from synapse_replication.streams.reader_table import State

#: By how much a heartbeat of a living process of this package may be late, in s.
MAX_LATENESS = 1.5


class WriterFacts(Struct, frozen=True, kw_only=True):
    """The facts that a process knows of one writer of one stream.

    All times are monotonic, in s; ``None`` if there is no such time.

    :ivar record: what was heard of the writer.
    :ivar hearing: whether the process has a link.
    :ivar deaf_detail: why it has none; empty if it has one, or this is not known.
    :ivar state: the state of the writer's reader.
    :ivar is_removed: whether the writer was removed, and its last rows are fetched.
    :ivar waiting_since: since when the writer could have announced its position.
    :ivar process_heard_at: when its process was last heard, in any stream.
    :ivar link_down_since: since when the link on which the writer was last heard has
        been down; ``None`` if it is up.
    :ivar link_detail: its name, and why it is down.
    :ivar silence_since: since when nothing has arrived from any of several processes
        that send heartbeats, so that the link itself is suspect; ``None`` if it is not.
    :ivar peer: the writer's process; ``None`` if it sent no heartbeats.
    """

    instance_name: str
    record: records.WriterRecord
    hearing: records.HearingRecord
    state: State = State.WAITING
    is_removed: bool = False
    deaf_detail: str = ""
    waiting_since: float = 0.0
    process_heard_at: float | None = None
    link_down_since: float | None = None
    link_detail: str = ""
    silence_since: float | None = None
    peer: records.PeerRecord | None = None


class Diagnosis(Struct, frozen=True):
    """The verdict about a writer.

    :ivar since: since when the writer has been stalled, in s; 0 if it is not.
    :ivar detail: an explanation of the reason, for display.
    """

    condition: Condition
    reason: StallReason | None = None
    since: float = 0.0
    detail: str = ""


def is_gone(peer: records.PeerRecord, hearing_since: float, now: float) -> bool:
    """Return whether a process has left, or its heartbeats have stopped.

    :param hearing_since: since when this process can hear it, in s.
    """
    if is_replaced(peer, hearing_since):
        return False
    return peer.heartbeat.is_leaving or peer.is_silent(hearing_since, now)


def heard_until(now: float, silence_since: float | None) -> float:
    """Return the time up to which the absence of a heartbeat says anything, in s.

    If nothing arrives from any of several processes, the link may be dead: a writer
    whose last heartbeat preceded the last message by some seconds has not stopped.

    :param silence_since: see :class:`WriterFacts`.
    """
    return now if silence_since is None else min(now, silence_since + USUAL_INTERVAL)


def is_replaced(peer: records.PeerRecord, hearing_since: float) -> bool:
    """Return whether a process lives that sends no heartbeats any more.

    It was restarted without this package. Any sign of life after a goodbye shows that.
    Without a goodbye, a sign of life shows it that a heartbeat would have preceded: one
    on a new link, on which a heartbeat is the first message, or a late one.
    """
    if peer.heartbeat.is_leaving:
        return peer.heard_at > peer.seen
    if peer.seen < hearing_since:
        return peer.heard_at > hearing_since
    return peer.heard_at > peer.seen + peer.heartbeat.every + MAX_LATENESS


_Found: TypeAlias = tuple[float, str] | None


#: How long a standby may lack announced rows before that is shown, in s. Most standbys
#: have them within a fraction of a second.
BEHIND_AFTER = 2.0


class Rule(Struct, frozen=True):
    """One reason for which a writer is stalled.

    :ivar check: returns since when it has applied, and the detail; ``None`` if it does
        not apply. Without a check, it applies if it was recorded as a problem.
    :ivar is_immediate: whether it need not last to be reported, because the rows will
        not arrive by waiting.
    """

    reason: StallReason
    check: Callable[[WriterFacts, float], _Found] | None = None
    is_immediate: bool = False


def _deaf(facts: WriterFacts, now: float) -> _Found:
    if facts.hearing.is_up:
        return None
    return facts.hearing.since, facts.deaf_detail or "no peer is connected"


def _link_down(facts: WriterFacts, now: float) -> _Found:
    if facts.state is not State.WAITING or facts.link_down_since is None:
        return None
    return facts.link_down_since, facts.link_detail


def _silence(facts: WriterFacts, now: float) -> _Found:
    since = facts.silence_since
    if since is None or now - since <= records.PEER_SILENT_AFTER:
        return None
    return since, (
        "nothing arrives from any process, although a link is up: it may be dead"
    )


def _gone(facts: WriterFacts, now: float) -> _Found:
    peer = facts.peer
    if peer is None or facts.is_removed:
        return None
    until = heard_until(now, facts.silence_since)
    if not is_gone(peer, facts.hearing.since, until):
        return None
    is_leaving = peer.heartbeat.is_leaving
    how = "announced its exit" if is_leaving else "no longer sends heartbeats"
    return peer.seen, f"{facts.instance_name} {how}"


def _ahead(facts: WriterFacts, now: float) -> _Found:
    if facts.record.behind_us is None:
        return None
    return facts.record.behind_since, (
        f"ahead of its writer: this process is at {facts.record.position}, but "
        f"{facts.instance_name} reports that it is at {facts.record.behind_us}"
    )


def _source_silent(facts: WriterFacts, now: float) -> _Found:
    if facts.state is not State.FETCHING:
        return None
    since = max(facts.record.fetching_since, facts.hearing.since)
    return since, "missing rows were requested, and their source has not answered"


def _no_progress(facts: WriterFacts, now: float) -> _Found:
    record, hearing = facts.record, facts.hearing.since
    if facts.state is State.WAITING:
        announced = record.announced_at
        if announced is None or announced < facts.waiting_since:
            return None
        detail = "its POSITION arrived, but was not handled yet"
        return max(announced, hearing), detail
    if facts.state is State.LIVE and record.lost_since is not None:
        return record.lost_since, (
            "a row arrived that cannot be parsed; it is fetched when the writer next "
            "announces its position"
        )
    if facts.state is State.LIVE and not record.lag():
        return None
    since = max(record.progress_at, record.oldest() or 0.0, hearing)
    if facts.state is State.LIVE:
        return since, "rows were announced, but none was delivered"
    return max(since, record.missing_since), "rows are missing, but none was delivered"


def _no_position(facts: WriterFacts, now: float) -> _Found:
    since, announced = facts.waiting_since, facts.record.announced_at
    if facts.state is not State.WAITING or facts.is_removed:
        return None
    if announced is not None and announced >= since:
        return None
    name = facts.instance_name
    if facts.process_heard_at is not None and facts.process_heard_at > since:
        return since, f"{name} runs, but has not announced its position"
    return since, f"{name} has not announced its position; is it running?"


def _database_behind(facts: WriterFacts, now: float) -> _Found:
    found = facts.record.problems.get(StallReason.DATABASE_BEHIND)
    if found is None or now - found[0] < BEHIND_AFTER:
        return None
    return found


#: Why a writer may be stalled, in the order in which the reasons are examined.
RULES: tuple[Rule, ...] = (
    # This process has no link.
    Rule(StallReason.NO_LINK, _deaf),
    # The link on which the writer was last heard is down, and the writer has announced
    # its position on no other.
    Rule(StallReason.NO_LINK, _link_down),
    # Several processes send heartbeats more often than every 15 s (each writer does,
    # among at most ten peers), and nothing has arrived for 15 s.
    Rule(StallReason.NO_LINK, _silence),
    # The writer's process said goodbye and gave no sign of life since, or its
    # heartbeats ceased: three intervals ago, at least 15 s, or its watchers say so.
    Rule(StallReason.WRITER_GONE, _gone),
    # The writer reports a position below the one of this process.
    Rule(StallReason.AHEAD_OF_WRITER, _ahead),
    # The database was set back, and this process had delivered later rows.
    Rule(StallReason.DATABASE_SET_BACK, is_immediate=True),
    # Rows of a writer that the configuration does not name were discarded.
    Rule(StallReason.UNDECLARED_WRITER, is_immediate=True),
    # Rows are not in their writer's memory any more.
    Rule(StallReason.ROWS_LOST, is_immediate=True),
    # The source returned rows that cannot be decoded, and they were skipped.
    Rule(StallReason.ROWS_SKIPPED, is_immediate=True),
    # The database is a standby, and has lacked announced rows for 2 s.
    Rule(StallReason.DATABASE_BEHIND, _database_behind, is_immediate=True),
    # Fetching or delivering missing rows fails.
    Rule(StallReason.CATCH_UP_FAILS),
    # Missing rows were requested, and their source has not answered.
    Rule(StallReason.SOURCE_SILENT, _source_silent),
    # Rows or a position arrived, or could have been fetched, and nothing was delivered
    # since.
    Rule(StallReason.NO_PROGRESS, _no_progress),
    # A link is up, and the writer has not announced its position on it.
    Rule(StallReason.NO_POSITION, _no_position),
)


def diagnose(facts: WriterFacts, now: float) -> Diagnosis:
    """Return the verdict about a writer.

    :param now: the monotonic time, in s.
    """
    for rule in RULES if facts.hearing.is_up else RULES[:1]:
        if rule.check is None:
            found = facts.record.problems.get(rule.reason)
        else:
            found = rule.check(facts, now)
        if found is None:
            continue
        since, detail = found
        if rule.is_immediate or now - since >= records.STALLED_AFTER:
            return Diagnosis(Condition.STALLED, rule.reason, since, detail)
    if not facts.hearing.is_up:
        return Diagnosis(Condition.WAITING)
    return Diagnosis(_condition(facts, now))


def _condition(facts: WriterFacts, now: float) -> Condition:
    if facts.is_removed:
        return Condition.DRAINING
    if facts.state is State.WAITING:
        return Condition.WAITING
    written = facts.record.oldest()
    is_late = written is not None and now - written >= records.LATE_AFTER
    is_lost = facts.record.lost_since is not None
    if facts.state is not State.LIVE or is_lost or (facts.record.lag() and is_late):
        return Condition.CATCHING_UP
    return Condition.LIVE
