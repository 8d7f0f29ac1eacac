"""A module that tests load into a process to write the number of tokens in a file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from twisted.application.internet import TimerService
from twisted.internet.defer import Deferred, maybeDeferred

from synapse_replication.errors import CommitUnknownError


def make_writer(host: Any, config: Mapping[str, Any]) -> TimerService:
    """Return a service that writes tokens of each stream up to the number in a file.

    Token ``n`` has ``n % 3 + 1`` rows. If its commit is not answered, it is not
    written again.

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
                with suppress(CommitUnknownError):
                    await maybeDeferred(streams[name].write, rows)

    return TimerService(0.02, lambda: Deferred.fromCoroutine(write()))
