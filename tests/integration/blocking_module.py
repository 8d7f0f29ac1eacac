"""Modules that tests load into a process to block it while a file exists."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.application.internet import TimerService
from twisted.internet.defer import Deferred

from synapse_replication.app.journal import JournalSink


def make_blocker(host: Any, config: Mapping[str, Any]) -> TimerService:
    """Return a service that blocks the reactor while a file exists.

    :param config: ``file``: while it exists, the reactor is blocked. When the block
        begins, a file of the same name with the suffix ``.held`` is created.
    """
    file = Path(config["file"])

    def block() -> None:
        while file.exists():
            file.with_suffix(".held").touch()
            time.sleep(0.05)

    return TimerService(0.05, block)


class _GatedJournal(JournalSink):
    """A journal that delays every write while a file exists."""

    def __init__(self, host: Any, path: Path, gate: Path) -> None:
        super().__init__(path, host.row_to_json)
        self._clock = host.clock
        self._gate = gate

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Any:
        write = super().on_rdata

        async def wait_and_write() -> None:
            while self._gate.exists():
                await self._clock.sleep(0.05)
            write(stream_name, instance_name, token, rows)

        return Deferred.fromCoroutine(wait_and_write())


def make_gated_journal(host: Any, config: Mapping[str, Any]) -> JournalSink:
    """Return a journal that blocks delivery while a file exists.

    :param config: ``path`` of the journal, and ``gate``, the file.
    """
    return _GatedJournal(host, Path(config["path"]), Path(config["gate"]))
