"""Counts what is published through Redis, by kind."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from typing import Any

import hiredis

from scripts.tools.scale.deployment import SERVER_NAME

_EXTENSION = f"{SERVER_NAME}/replication_ext"


class Traffic:
    """Subscribes to all channels, and counts messages and bytes in a thread.

    :ivar messages: the messages by kind; those to one process alone have the suffix
        ``(to one)``.
    :ivar bytes: their bytes.
    """

    def __init__(self, host: str, port: int) -> None:
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._address = host, port
        threading.Thread(target=self._listen, daemon=True).start()

    def take(self) -> tuple[Counter[str], Counter[str]]:
        """Return the counts since the last call."""
        taken = self.messages, self.bytes
        self.messages, self.bytes = Counter(), Counter()
        return taken

    def _listen(self) -> None:
        while True:
            try:
                with socket.create_connection(self._address) as connection:
                    self._read(connection)
            except OSError:
                # Redis is being restarted.
                threading.Event().wait(0.05)

    def _read(self, connection: socket.socket) -> None:
        command: Any = ("PSUBSCRIBE", f"{SERVER_NAME}*")
        connection.sendall(hiredis.pack_command(command))
        reader = hiredis.Reader()
        while data := connection.recv(1 << 20):
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if reply[0] == b"pmessage":
                    self._count(reply[2].decode(), reply[3])

    def _count(self, channel: str, payload: bytes) -> None:
        kind = payload.partition(b" ")[0].decode("ascii", "replace")
        if channel.startswith(_EXTENSION):
            kind = json.loads(payload)["type"]
            if channel != _EXTENSION:
                kind += " (to one)"
        self.messages[kind] += 1
        self.bytes[kind] += len(payload)
