"""Runs ``synapse-replication follow --verify`` beside a deployment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synapse_replication.testing.private_process import die_with_parent

#: How long a committed row may wait for its announcement, in s.
PATIENCE = 15.0
#: How long the meter needs at most to report a row, in s: two checks find it, and a
#: third one reports it.
SETTLE = PATIENCE + 20.0


class Meter:
    """A loss meter, as a process of its own, connected to Redis directly.

    :param folder: the folder for its configuration and its output.
    :param config: its configuration.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        path = folder / "meter.yaml"
        path.write_text(json.dumps(config))
        self._output = folder / "meter.jsonl"
        with self._output.open("wb") as out, (folder / "meter.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "synapse_replication.cli.main", "follow"),
                    *("--verify", "--json", "--patience", str(PATIENCE)),
                    *("-c", str(path)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    def finish(self) -> tuple[str, ...]:
        """Wait until everything was verified, and stop the meter.

        :return: the rows that were never announced, as ``stream token of writer``.
        """
        time.sleep(SETTLE)
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        lost: dict[tuple[str, int], str] = {}
        for line in self._output.read_text().splitlines():
            found = json.loads(line)
            if "summary" in found:
                continue
            key = found["stream_name"], found["token"]
            if found["is_announced"]:
                lost.pop(key, None)
            else:
                lost[key] = found["instance_name"]
        return tuple(
            f"{stream} {token} of {writer}"
            for (stream, token), writer in sorted(lost.items())
        )

    def kill(self) -> None:
        """Stop the meter at once."""
        self._process.kill()
        self._process.wait()
