"""A service that records the long turns of its process's reactor, in CPU time as well.

Other processes on the same processors lengthen a turn, but not its CPU time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet import reactor  # noqa: TID251 -- it is measured
from typing_extensions import override

#: The shortest turn that is recorded, in s of CPU time.
LONG = 0.005


class TurnRecorder(Service):
    """Appends a line of JSON to a file for each turn of at least :data:`LONG`.

    :param path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._began = (0.0, 0.0)
        self._inner: Any = None

    @override
    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        polled: Any = reactor
        self._inner, polled._poller = polled._poller, self  # noqa: SLF001 -- Twisted's own
        self._began = (time.thread_time(), time.perf_counter())

    def poll(self, *args: Any) -> Any:
        """Record the turn that ends, and wait for events."""
        cpu, wall = self._began
        if (used := time.thread_time() - cpu) >= LONG:
            turn = {"cpu": used, "wall": time.perf_counter() - wall}
            self._file.write(json.dumps(turn) + "\n")
        found = self._inner.poll(*args)
        self._began = (time.thread_time(), time.perf_counter())
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def make_recorder(host: Any, config: Mapping[str, Any]) -> TurnRecorder:
    """Return the recorder for an entry of ``modules``.

    :param config: ``path``: the file.
    """
    return TurnRecorder(Path(config["path"]))
