"""The overall state of a process's replication, and its description in one line."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from msgspec import Struct

from synapse_replication.instrumentation.status import model
from synapse_replication.instrumentation.status.model import Condition
from synapse_replication.text import counted, printable


class Standing(enum.Enum):
    """The overall state of a process's replication, the worst first."""

    DUPLICATE_NAME = enum.auto()
    INSTANCE_PROBLEM = enum.auto()
    STALLED = enum.auto()
    CUT_OFF = enum.auto()
    STUCK_ID = enum.auto()
    ROWS_UNANNOUNCED = enum.auto()
    SINK_DAMAGED = enum.auto()
    WAITING = enum.auto()
    CATCHING_UP = enum.auto()
    DRAINING = enum.auto()
    NOT_READY = enum.auto()
    LIVE = enum.auto()


_CONDITIONS = {
    Standing.WAITING: Condition.WAITING,
    Standing.CATCHING_UP: Condition.CATCHING_UP,
    Standing.DRAINING: Condition.DRAINING,
}


class Assessment(Struct, frozen=True):
    """The worst state of a process's replication.

    :ivar standing: the state.
    :ivar concerned: the writers in that state; empty for ``DUPLICATE_NAME``,
        ``CUT_OFF``, ``STUCK_ID``, ``SINK_DAMAGED``, ``NOT_READY`` and ``LIVE``.
    :ivar followed: all writers whose rows the process receives.
    """

    standing: Standing
    concerned: Sequence[model.WriterStatus]
    followed: Sequence[model.WriterStatus]


def assess(status: model.ProcessStatus) -> Assessment:
    """Return the worst state of a process's replication."""
    followed = [w for w in status.writers if w.condition is not Condition.WRITTEN_HERE]
    concerned: dict[Standing, Sequence[model.WriterStatus]] = {
        standing: [writer for writer in followed if writer.condition is condition]
        for standing, condition in _CONDITIONS.items()
    }
    concerned[Standing.STALLED] = status.stalled
    causes: dict[Standing, object] = {
        Standing.DUPLICATE_NAME: status.duplicates,
        Standing.INSTANCE_PROBLEM: status.troubled,
        Standing.ROWS_UNANNOUNCED: status.unannounced,
        Standing.CUT_OFF: status.is_cut_off,
        Standing.STUCK_ID: status.stuck_ids,
        Standing.SINK_DAMAGED: status.damage,
        Standing.NOT_READY: status.not_ready,
        Standing.LIVE: True,
        **concerned,
    }
    worst = next(standing for standing in Standing if causes[standing])
    return Assessment(worst, concerned.get(worst, ()), followed)


def describe_process(status: model.ProcessStatus) -> str:
    """Return the worst state of a process's replication in one line.

    The line contains no durations, so it does not change merely because time passes.
    """
    found = assess(status)
    standing, concerned = found.standing, found.concerned
    if not concerned and standing is not Standing.LIVE:
        return _describe_problem(status, standing)
    if standing is Standing.LIVE:
        return _describe_live(found.followed)
    more = _and_more(concerned)
    if standing is Standing.STALLED:
        worst = max(concerned, key=lambda writer: writer.stalled_for)
        return f"stalled: {model.name_writer(worst)}: {worst.detail}{more}"
    if standing is Standing.WAITING:
        return f"waiting for {model.name_writer(concerned[0])}{more}"
    if standing is Standing.DRAINING:
        first = concerned[0]
        name = model.name_writer(first)
        return f"draining removed writer {name}, {first.lag:,} behind{more}"
    last = max(concerned, key=lambda writer: writer.lag)
    name = model.name_writer(last)
    if last.started_from is None:
        return f"catching up {name}, {last.lag:,} behind{more}"
    return f"catching up {name} {model.describe_progress(last)}{more}"


def _describe_problem(status: model.ProcessStatus, standing: Standing) -> str:
    """Return a problem that does not concern single writers, in one line."""
    if standing is Standing.DUPLICATE_NAME:
        return f"two processes are called {status.duplicates[0].instance_name}"
    if standing is Standing.INSTANCE_PROBLEM:
        return describe_instances(status)
    if standing is Standing.CUT_OFF:
        return "no link is up"
    if standing is Standing.STUCK_ID:
        return f"stuck: {model.describe_stuck_id(status.stuck_ids[0])}"
    if standing is Standing.ROWS_UNANNOUNCED:
        return f"{counted(status.unannounced, 'row')} committed and not announced"
    if standing is Standing.SINK_DAMAGED:
        return f"damaged: {printable(status.damage)}"
    return f"not ready: {status.not_ready[0]}"


def describe_instances(status: model.ProcessStatus) -> str:
    """Return the problem of an instance, and how many others have one."""
    first, *others = status.troubled
    text = f"{printable(first.instance_name)}: {printable(first.problem)}"
    return f"{text}, and {len(others)} more" if others else text


def _describe_live(followed: Sequence[model.WriterStatus]) -> str:
    if not followed:
        return "live: follows no other process"
    writers = {writer.instance_name for writer in followed}
    streams = {writer.stream_name for writer in followed}
    text = (
        f"live: {counted(len(streams), 'stream')} of {counted(len(writers), 'writer')}"
    )
    last = max(followed, key=lambda writer: writer.lag)
    if last.lag:
        text += f", {model.name_writer(last)} {last.lag:,} behind"
    if resynced := [writer for writer in followed if writer.was_resynced]:
        text += f"; partial resync of {model.name_writers(resynced)}"
    return text


def _and_more(writers: Sequence[model.WriterStatus]) -> str:
    return f", and {len(writers) - 1} more" if len(writers) > 1 else ""
