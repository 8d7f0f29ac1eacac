"""The module with which the main process of ``scripts/scale`` records what it does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from typing_extensions import override

from synapse_replication.handlers.events import RowsServed
from synapse_replication.instrumentation.turns import ReactorTurns

#: The shortest turn that is recorded, in s.
SHORTEST = 0.002


class Meter(ReactorTurns):
    """Adds a line to a file for each request for rows, and for each long turn."""

    def __init__(self, host: Any, path: Path) -> None:
        super().__init__()
        self._file = path.open("a", buffering=1)
        self._span = host.observer.span
        host.observer.span = self._serve

    def _serve(self, work: Any) -> AbstractContextManager[object]:
        if isinstance(work, RowsServed):
            self._file.write(f"request {work.stream_name}\n")
        context: AbstractContextManager[object] = self._span(work)
        return context

    @override
    def add(self, seconds: float) -> None:
        if seconds >= SHORTEST:
            self._file.write(f"turn {seconds:.4f}\n")


def make_meter(host: Any, config: Mapping[str, Any]) -> None:
    """Start to record; called by the process that the configuration describes."""
    # The reactor is installed by then, and not when this module is imported.
    from twisted.internet import reactor  # noqa: TID251

    Meter(host, Path(config["path"])).start(reactor)
