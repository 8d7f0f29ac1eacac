"""A module of Synapse that logs every row that a process's replication delivers.

It runs inside all of Synapse's processes, including stock ones, and therefore imports
only the standard library. Each epoch of a process has a file of its own. Each line is a
JSON array:

``["start", time, {stream: {writer: token}}]``
    The process has started, and has read these positions from the database: rows at or
    below them were committed before and need no delivery.
``["rows", time, stream, writer, token, keys]``
    The rows of one token were delivered to the host. For ``typing``, ``keys`` contains
    the room and the users of each row; for other streams it is empty.

Times are in s since the Unix epoch.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def log_name(instance_name: str, pid: int) -> str:
    """Return the name of the file of one epoch of a process."""
    return f"{instance_name}.{pid}.witness"


class Witness:
    """Logs the rows that are delivered to one process.

    :param config: ``folder`` of the logs; ``writers``, the names of all processes;
        ``streams``, the names of the streams whose positions are logged; optionally
        ``bug``, the dotted name of a function that introduces a deliberate bug and is
        called in processes with this package.
    :param api: Synapse's interface for modules.
    """

    def __init__(self, config: Mapping[str, Any], api: Any) -> None:
        hs = api._hs  # noqa: SLF001 -- Synapse's own
        name = hs.get_instance_name()
        path = Path(config["folder"]) / log_name(name, os.getpid())
        # Line buffered, so that a killed process leaves complete lines.
        self._file = path.open("a", buffering=1, encoding="utf-8")
        _introduce_bug(hs, config.get("bug"))
        handler = hs.get_replication_data_handler()
        self._deliver = handler.on_rdata
        handler.on_rdata = self._on_rdata
        self._write("start", _positions(hs, config["streams"], config["writers"]))

    async def _on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: Any
    ) -> None:
        await self._deliver(stream_name, instance_name, token, rows)
        if not rows:
            # The host's own handler also calls this for a position.
            return
        keys = []
        if stream_name == "typing":
            keys = [[row.room_id, sorted(row.user_ids)] for row in rows]
        self._write("rows", stream_name, instance_name, token, keys)

    def _write(self, kind: str, *values: Any) -> None:
        self._file.write(json.dumps([kind, time.time(), *values]) + "\n")


def _positions(
    hs: Any, streams: list[str], writers: list[str]
) -> dict[str, dict[str, int]]:
    classes = importlib.import_module("synapse.replication.tcp.streams").STREAMS_MAP
    return {
        name: {writer: int(stream.current_token(writer)) for writer in writers}
        for name, stream in ((name, classes[name](hs)) for name in streams)
    }


def _introduce_bug(hs: Any, bug: str | None) -> None:
    is_ours = type(hs.get_replication_command_handler()).__module__.startswith(
        "synapse_replication."
    )
    if bug and is_ours:
        module, _, function = bug.rpartition(".")
        getattr(importlib.import_module(module), function)()
