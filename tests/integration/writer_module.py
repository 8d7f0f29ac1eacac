"""A module that tests load into a process to write the number of tokens in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg2
from twisted.application.internet import TimerService
from twisted.internet.defer import Deferred, maybeDeferred

from synapse_replication.errors import CommitUnknownError


def make_writer(host: Any, config: Mapping[str, Any]) -> TimerService:
    """Return a service that writes tokens of each stream up to the number in a file.

    Token ``n`` has ``n % 3 + 1`` rows. They are written again if their transaction was
    rolled back because its connection was lost.

    :param config: ``file``: contains the number; ``after``: the number written before;
        ``streams``: their names, ``notes`` and ``typing`` by default; ``more``: the
        values of further columns of ``notes``.
    """
    file = Path(config["file"])
    streams = host.streams.get_streams()
    written = config.get("after", 0)
    names = config.get("streams", ("notes", "typing"))

    async def write() -> None:
        nonlocal written
        while file.exists() and written < int(file.read_text() or 0):
            written += 1
            for name in names:
                from_json = streams[name].description.codec.from_json
                rows = [
                    from_json(
                        [f"note {written}", n, *config.get("more", ())]
                        if name == "notes"
                        else [f"!{written}:x", [f"@{n}:x"]]
                    )
                    for n in range(written % 3 + 1)
                ]
                while not await is_written(streams[name], rows):
                    pass

    async def is_written(stream: Any, rows: list[Any]) -> bool:
        try:
            await maybeDeferred(stream.write, rows)
        except CommitUnknownError:
            # If so, they are announced; if not, their numbers are not written.
            return True
        except psycopg2.OperationalError:
            return False
        return True

    return TimerService(0.02, lambda: Deferred.fromCoroutine(write()))
