"""A module that a process of ours loads to record the tokens of ``events``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred

from synapse_replication.api import MultiWriterStreamToken


class TokenRecorder(Service):
    """Writes the persisted-up-to token, whenever it has advanced, to a file.

    It first waits for that token, which must have been reached, and reads the token of
    the stream.
    """

    def __init__(self, host: Any, path: Path) -> None:
        self._rows = host.rows
        self._stream = host.streams.get_streams()["events"]
        self._path = path

    def startService(self) -> None:
        """Begin to record."""
        super().startService()
        self._write(self._stream.current_stream_token().stream)
        self._rows.call_when_persisted("events", self._persisted)

    def _persisted(self, token: int) -> None:
        Deferred.fromCoroutine(self._record(token))

    async def _record(self, token: int) -> None:
        await self._rows.wait_for_stream_token("events", MultiWriterStreamToken(token))
        self._write(token)

    def _write(self, token: int) -> None:
        current = self._stream.current_stream_token()
        line = {
            "persisted": token,
            "minimum": current.stream,
            "writers": dict(current.instance_map),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def make_recorder(host: Any, config: Mapping[str, Any]) -> TokenRecorder:
    """Return the service.

    :param config: ``path``: the file.
    """
    return TokenRecorder(host, Path(config["path"]))
