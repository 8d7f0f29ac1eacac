"""What the tests plug into a main process: it writes what a file tells it to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.application.internet import TimerService
from twisted.internet.defer import Deferred, maybeDeferred


def make_writer(host: Any, config: Mapping[str, Any]) -> TimerService:
    """Write up to as many tokens, of each stream, as a file says.

    Token ``n`` has ``n % 3 + 1`` rows.

    :param config: ``file``: it holds a number; ``after``: how many others wrote;
        ``streams``: their names, ``notes`` and ``typing`` by default.
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
                        [f"note {written}", n]
                        if name == "notes"
                        else [f"!{written}:x", [f"@{n}:x"]]
                    )
                    for n in range(written % 3 + 1)
                ]
                await maybeDeferred(streams[name].write, rows)

    return TimerService(0.02, lambda: Deferred.fromCoroutine(write()))
