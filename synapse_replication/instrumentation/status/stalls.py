"""Log lines about what is stalled: why, since when, what to do, and that it is over.

Nothing that happens tells that rows do not come, so it is found by looking at the
status now and then. What has one reason is one line: Redis being down is not nineteen.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from twisted.logger import Logger

from synapse_replication.instrumentation.logs import REPEAT_AFTER
from synapse_replication.instrumentation.status.model import (
    ProcessStatus,
    group_stalls,
    name_writers,
)

__all__ = ["StallLog"]


class StallLog:
    """Logs what is stalled, and once a minute while it lasts.

    :param logger: where to.
    :param monotonic: gives a time in s that never goes back.
    """

    def __init__(
        self, logger: Logger, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._monotonic = monotonic
        #: The reason of each (stream, writer) that is stalled.
        self._reasons: dict[tuple[str, str], str] = {}
        #: When each group was logged last, by its reason and names.
        self._logged: dict[tuple[str, str], float] = {}

    def look(self, status: ProcessStatus) -> None:
        """Log what is new. Called every few seconds."""
        now = self._monotonic()
        reasons: dict[tuple[str, str], str] = {}
        logged: dict[tuple[str, str], float] = {}
        for group in group_stalls(status.writers):
            reason = group.reason
            keys = [(each.stream_name, each.instance_name) for each in group.writers]
            is_new = any(self._reasons.get(key) != reason for key in keys)
            reasons.update(dict.fromkeys(keys, reason))
            last = self._logged.get((reason, group.names), float("-inf"))
            if is_new or now - last >= REPEAT_AFTER:
                last = now
                self._logger.warn(
                    "{streams} stalled for {seconds:.0f} s: {detail}. {remedy} (In the "
                    "runbook: ReplicationStalled, {reason})",
                    streams=group.names,
                    seconds=group.stalled_for,
                    detail=group.detail.rstrip("."),
                    remedy=group.remedy,
                    reason=reason,
                )
            logged[reason, group.names] = last
        over = [
            writer
            for writer in status.writers
            if (key := (writer.stream_name, writer.instance_name)) in self._reasons
            and key not in reasons
        ]
        if over:
            self._logger.info(
                "{streams} not stalled any more", streams=name_writers(over)
            )
        self._reasons, self._logged = reasons, logged
