"""Runs a module on both sides, and compares the outcomes of its tests."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import psycopg2.extensions

from scripts.tools.synapse_suite.outcomes import EXPECTED_FAILURE, SKIP, SUCCESS

#: The timeout of one module, in s. Unfinished tests count as lost.
TIMEOUT = 1200.0
#: The time that a hanging module has to print where it hangs, in s.
_ABORT_TIMEOUT = 10.0

_RUNNER = "scripts.tools.synapse_suite.outcomes"


@attrs.frozen
class ModuleRun:
    """The outcomes of the tests of a module on one side.

    :ivar outcomes: the outcomes by test id.
    :ivar seconds: the duration in s.
    :ivar log: the file with trial's output.
    """

    outcomes: Mapping[str, str]
    seconds: float
    log: Path

    @property
    def successes(self) -> frozenset[str]:
        """The ids of the tests that succeeded."""
        return frozenset(
            test for test, outcome in self.outcomes.items() if outcome == SUCCESS
        )

    @property
    def failing(self) -> list[str]:
        """The sorted ids of the tests that failed, with the outcome of each."""
        return sorted(
            f"{test} ({outcome})"
            for test, outcome in self.outcomes.items()
            if outcome not in (SUCCESS, SKIP, EXPECTED_FAILURE)
        )


@attrs.frozen
class Comparison:
    """The outcomes of a module with stock Synapse and with this package."""

    name: str
    stock: ModuleRun
    ours: ModuleRun

    @property
    def lost(self) -> list[str]:
        """The sorted ids of the tests that succeed only with stock Synapse."""
        return sorted(self.stock.successes - self.ours.successes)

    @property
    def is_good(self) -> bool:
        """Whether the tests ran on stock Synapse, and none that succeeds fails on ours.

        All tests of a module may be skipped.
        """
        return bool(self.stock.outcomes) and not self.lost


@attrs.frozen
class Suite:
    """Runs modules of the homeserver's tests.

    :ivar source: the folder that contains ``tests``.
    :ivar folder: the folder for logs and results.
    :ivar dsn: the connection string of a PostgreSQL server whose user may create
        databases.
    :ivar options: the options of ``synapse-replication exec``.
    :ivar resume: whether to skip a module that has a result in the folder.
    """

    source: Path
    folder: Path
    dsn: str
    options: Sequence[str] = ()
    resume: bool = False

    def compare(self, name: str) -> Comparison:
        """Run a module with stock Synapse, then with this package."""
        stock = self._run(name, "stock", [sys.executable, "-m"])
        ours = [sys.executable, "-m", "synapse_replication", "exec", *self.options]
        return Comparison(name, stock, self._run(name, "ours", [*ours, "-m"]))

    def _run(self, name: str, side: str, command: Sequence[str]) -> ModuleRun:
        path = self.folder / f"{name}.{side}.jsonl"
        log = self.folder / f"{name}.{side}.log"
        # This file is written when the module has ended.
        time_taken = self.folder / f"{name}.{side}.seconds"
        if not (self.resume and time_taken.exists()):
            for old in (path, time_taken):
                old.unlink(missing_ok=True)
            started = time.monotonic()
            self._run_process([*command, _RUNNER, str(path), name], log)
            time_taken.write_text(f"{time.monotonic() - started:.1f}", "utf-8")
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        return ModuleRun(
            dict(json.loads(line) for line in lines),
            float(time_taken.read_text("utf-8")),
            log,
        )

    def _run_process(self, command: Sequence[str], log: Path) -> None:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.source,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_raise_file_limit,
            )
            try:
                process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ABORT_TIMEOUT)
            finally:
                process.kill()
                process.wait()

    def _environ(self) -> dict[str, str]:
        parameters = psycopg2.extensions.parse_dsn(self.dsn)
        names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
        return {
            **os.environ,
            # This package need not be installed; the tests' own folder comes first.
            "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
            "SYNAPSE_POSTGRES": "1",
            # A lock would keep a session open to each database that a test drops.
            "SYNAPSE_REPLICATION_WRITER_LOCK": "false",
            **{
                f"SYNAPSE_POSTGRES_{name}": str(parameters[key])
                for key, name in names.items()
                if key in parameters
            },
        }


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
