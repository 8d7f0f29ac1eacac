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

from synapse_replication.errors import ServerStartError
from synapse_replication.testing.private_process import die_with_parent

#: How long a committed row may wait for its announcement, in s.
PATIENCE = 15.0
#: How long the meter needs at most to report a row, in s: two checks find it, and a
#: third one reports it.
SETTLE = PATIENCE + 20.0


def read_findings(output: str) -> tuple[str, ...]:
    """Return the rows that were never announced, as ``stream token of writer``.

    :param output: what the meter printed: a JSON object on each line.
    """
    lost: dict[tuple[str, int], str] = {}
    for line in output.splitlines():
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


class Meter:
    """A loss meter, as a process of its own.

    :param config_file: the configuration of the deployment.
    :param settings: the settings that replace those of ``config_file``.
    """

    def __init__(self, config_file: Path, settings: Mapping[str, Any]) -> None:
        folder = config_file.parent
        path = folder / "meter.yaml"
        path.write_text(json.dumps(settings))
        self._log = folder / "meter.log"
        self._output = folder / "meter.jsonl"
        with self._output.open("wb") as out, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "synapse_replication.cli.main", "follow"),
                    *("--verify", "--json", "--patience", str(PATIENCE)),
                    *("-c", str(config_file), "-c", str(path)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    def finish(self) -> tuple[str, ...]:
        """Wait until everything was verified, and stop the meter.

        :return: the rows that were never announced, as ``stream token of writer``.
        :raises ServerStartError: if the meter has ended before.
        """
        time.sleep(SETTLE)
        if self._process.poll() is not None:
            raise ServerStartError(f"the meter ended: {self._log.read_text()[-2000:]}")
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        return read_findings(self._output.read_text())

    def kill(self) -> None:
        """Stop the meter at once."""
        self._process.kill()
        self._process.wait()
