"""Log lines about stalled writers and stuck ids, and about the end of each stall.

A line about a stall contains the reason, the duration and the hint.

No observer event reports that a writer has stalled, so the status is checked
periodically. Writers that are stalled for the same reason, with the same detail, share
one line: if Redis is down, one line says so for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from twisted.logger import Logger

from synapse_replication.instrumentation.logs import REPEAT_AFTER
from synapse_replication.instrumentation.status import model
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.instrumentation.turns import Stall


def sentence(text: str) -> str:
    """Return a text with a full stop, unless it ends a sentence already."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


class StallLog:
    """Logs writers that stall; repeats each line once a minute until the stall ends.

    :param logger: the logger to write to.
    :param monotonic: returns a monotonic time in s.
    """

    def __init__(
        self, logger: Logger, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._monotonic = monotonic
        #: The reason of each stalled (stream, writer).
        self._reasons: dict[tuple[str, str], str] = {}
        #: The time at which each group was last logged, by its reason and names.
        self._logged: dict[tuple[str, str], float] = {}

    def report_turns(self, stall: Stall | None) -> None:
        """Log that the reactor stalled since the last call, if it did."""
        if stall is not None:
            self._logger.warn(
                "The reactor was blocked for {longest:.2f} s, during which this "
                "process handled nothing else ({count} such turns). (See the runbook: "
                "ReplicationReactorStalls.) {what}",
                longest=stall.longest,
                count=stall.count,
                what=f"It was executing {stall.what}"
                if stall.what
                else "It ended before it was seen what was executed",
            )

    def check(self, observer: StatusObserver) -> None:
        """Log the changes since the last call. Call this every few seconds."""
        # A snapshot of an idle process would take a third of the CPU time that its
        # replication takes.
        if self._reasons or self._logged or not observer.is_quiet():
            self.update(observer.snapshot())

    def update(self, status: model.ProcessStatus) -> None:
        """Log the changes since the last call."""
        now = self._monotonic()
        reasons: dict[tuple[str, str], str] = {}
        logged: dict[tuple[str, str], float] = {}
        for group in model.group_stalls(status.writers):
            reason = group.reason
            keys = [(each.stream_name, each.instance_name) for each in group.writers]
            is_new = any(self._reasons.get(key) != reason for key in keys)
            reasons.update(dict.fromkeys(keys, reason))
            last = self._logged.get((reason, group.names), -math.inf)
            if is_new or now - last >= REPEAT_AFTER:
                last = now
                self._logger.warn(
                    "{streams} stalled for {seconds:.0f} s: {detail} {hint} (See "
                    "the runbook: ReplicationStalled, {reason})",
                    streams=group.names,
                    seconds=group.stalled_for,
                    detail=sentence(group.detail),
                    hint=group.hint,
                    reason=reason,
                )
            logged[reason, group.names] = last
        resumed = []
        for writer in status.writers:
            key = writer.stream_name, writer.instance_name
            if key not in self._reasons or key in reasons:
                continue
            if writer.condition is model.Condition.WAITING:
                # Whether the stall has ended is not known yet.
                reasons[key] = self._reasons[key]
            else:
                resumed.append(writer)
        for stuck in status.stuck_ids:
            name = model.describe_stuck_id(stuck)
            logged["stuck_id", name] = self._logged.get(("stuck_id", name), -math.inf)
            if stuck.session and now - logged["stuck_id", name] >= REPEAT_AFTER:
                logged["stuck_id", name] = now
                self._logger.warn(
                    "{name} for {seconds:.0f} s: {session}. {hint} (See the runbook: "
                    "ReplicationStuckId)",
                    name=name,
                    seconds=stuck.age,
                    session=stuck.session,
                    hint=stuck.hint,
                )
        for (kind, name), last in self._logged.items():
            if kind == "stuck_id" and last >= 0 and (kind, name) not in logged:
                self._logger.info("No longer true: {name}", name=name)
        if resumed:
            self._logger.info(
                "{streams} no longer stalled", streams=model.name_writers(resumed)
            )
        self._reasons, self._logged = reasons, logged
