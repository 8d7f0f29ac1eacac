"""Tests for the unit files of ``docs/systemd`` with systemd itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from configparser import ConfigParser
from pathlib import Path

from click.testing import CliRunner
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from synapse_replication.cli.common import EXIT_USAGE
from synapse_replication.cli.main import cli

UNITS = Path(__file__).parent.parent / "docs" / "systemd"
PROGRAM = "/opt/synapse-replication/bin/synapse-replication"

#: Ten times the greatest exposure, from 0 to 10, that ``systemd-analyze security`` may
#: report.
MAX_EXPOSURE = 15
#: The first version that can check files offline.
OLDEST = 250


def systemd_analyze() -> str:
    """Return the path of ``systemd-analyze``."""
    program = shutil.which("systemd-analyze")
    if program is None:
        raise SkipTest("systemd-analyze is not installed; it comes with systemd")
    version = subprocess.run([program, "--version"], capture_output=True, text=True)
    found = re.match(r"systemd (\d+)", version.stdout)
    if found is None or int(found[1]) < OLDEST:
        raise SkipTest(f"systemd-analyze is older than {OLDEST}: {version.stdout}")
    return program


class UnitFilesTests(SynchronousTestCase):
    def installed(self) -> list[str]:
        """
        Copy the unit files with an existing program, and the worker's with a name.
        """
        folder = Path(tempfile.mkdtemp(prefix="units-"))
        self.addCleanup(shutil.rmtree, folder)
        paths = []
        for file in sorted(UNITS.glob("*.service")):
            text = file.read_text().replace(PROGRAM, sys.executable)
            path = folder / file.name.replace("@.", "@event_persister1.")
            path.write_text(text)
            paths.append(str(path))
        return paths

    def run_systemd_analyze(self, *arguments: str) -> str:
        done = subprocess.run(
            [systemd_analyze(), *arguments], capture_output=True, text=True
        )
        text = done.stdout + done.stderr
        self.assertEqual(done.returncode, 0, text)
        return text

    def test_verify(self) -> None:
        """``systemd-analyze verify`` reports nothing."""
        paths = self.installed()
        self.assertEqual(len(paths), 2)
        self.assertEqual(
            self.run_systemd_analyze("verify", "--man=no", *paths).strip(), ""
        )

    def test_hardened(self) -> None:
        """The units have few permissions beyond those they need."""
        for path in self.installed():
            self.run_systemd_analyze(
                "security", "--offline=yes", f"--threshold={MAX_EXPOSURE}", path
            )

    def settings(self) -> list[ConfigParser]:
        parsed = []
        for file in sorted(UNITS.glob("*.service")):
            parser = ConfigParser(strict=False, interpolation=None)
            parser.optionxform = str  # type: ignore[assignment,method-assign]
            parser.read(file)
            parsed.append(parser)
        return parsed

    def test_commands(self) -> None:
        """The units start existing commands with existing options."""
        for parser in self.settings():
            start = parser["Service"]["ExecStart"].split()
            self.assertEqual(start[0], PROGRAM)
            result = CliRunner().invoke(cli, [*start[1:], "--log-json", "--help"])
            self.assertEqual(result.exit_code, 0, result.output)

    def test_exit_status(self) -> None:
        """An error in the configuration does not lead to a restart loop."""
        for parser in self.settings():
            self.assertEqual(
                int(parser["Service"]["RestartPreventExitStatus"]), EXIT_USAGE
            )

    def test_alike(self) -> None:
        """Main and workers have the same settings."""
        main, worker = self.settings()
        for parser in (main, worker):
            for name in ("ExecStart", "ExecReload"):
                del parser["Service"][name]
        self.assertEqual(dict(main["Service"]), dict(worker["Service"]))


class OverrideTests(SynchronousTestCase):
    def test_verify(self) -> None:
        """Systemd accepts the drop-in file for a unit like Synapse's."""
        folder = Path(tempfile.mkdtemp(prefix="units-"))
        self.addCleanup(shutil.rmtree, folder)
        unit = folder / "matrix-synapse.service"
        unit.write_text(f"[Service]\nType=notify\nExecStart={sys.executable} -V\n")
        override = (UNITS / "matrix-synapse-override.conf").read_text()
        drop_ins = folder / "matrix-synapse.service.d"
        drop_ins.mkdir()
        (drop_ins / "replication.conf").write_text(
            override.replace("/opt/venvs/matrix-synapse/bin/python", sys.executable)
        )
        done = subprocess.run(
            [systemd_analyze(), "verify", "--man=no", str(unit)],
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))
