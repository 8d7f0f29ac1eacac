"""Tests for ``synapse-replication exec`` in an environment with Synapse."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.external import skip_reason
from tests.support.synapse_process import interpreter

skip = skip_reason("synapse")

#: A module that prints what it finds in its process.
PROBE = """
import json, linecache, os, sys, traceback
from synapse.replication.tcp import handler, redis
print(json.dumps({
    "arguments": sys.argv[1:],
    "generated": [name for name in linecache.cache if "generated" in name],
    "frames": [frame.name for frame in traceback.extract_stack()],
    "handled": str(sys.exc_info()[0]),
    "handler": handler.ReplicationCommandHandler.__module__,
    "modules": list(sys.modules),
    "path": sys.path,
    "pid": os.getpid(),
    "redis": redis.SynapseRedisFactory.__module__,
    "rows": os.environ["SYNAPSE_REPLICATION_BACKLOG_ROWS"],
    "utf8_mode": sys.flags.utf8_mode,
}))
"""


class ExecTests(SynchronousTestCase):
    """Tests for the process in which the module runs."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.folder.mkdir()
        (self.folder / "probe.py").write_text(PROBE)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [interpreter(), "-X", "utf8=1", "-m", "synapse_replication", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def test_process(self) -> None:
        """
        The module replaces the command in the same process, on a short stack, with the
        same options of Python, in the working directory, and without the command line's
        modules.
        """
        options = ("--except", "redis", "--backlog-rows", "7")
        process = self.start("exec", *options, "-m", "probe", "-c", "a file")
        output, errors = process.communicate()
        self.assertEqual(process.returncode, 0, errors)
        found: dict[str, Any] = json.loads(output)
        self.assertEqual(found["pid"], process.pid)
        self.assertEqual(found["arguments"], ["-c", "a file"])
        self.assertEqual(found["rows"], "7")
        self.assertEqual(found["utf8_mode"], 1)
        self.assertEqual(found["path"].count(str(self.folder.resolve())), 1)
        self.assertEqual(found["handled"], "None")
        runners = ["run_module", "_run_module_code", "_run_code", "<module>"]
        self.assertEqual(found["frames"][3:], ["main", *runners])
        self.assertTrue(found["handler"].startswith("synapse_replication."))
        self.assertTrue(found["redis"].startswith("synapse."))
        self.assertFalse({"click", "synapse_replication.cli"} & set(found["modules"]))
        # The text of generated methods would take memory in every process.
        self.assertNotIn("synapse_replication.", "".join(found["generated"]))

    def test_hooks_not_found(self) -> None:
        """If a function for hooks cannot be imported, nothing is started."""
        process = self.start("exec", "--hooks", "nowhere.subscribe", "-m", "probe")
        output, errors = process.communicate()
        self.assertEqual((process.returncode, output), (2, ""))
        self.assertIn("synapse-replication exec: ", errors)
        self.assertIn("nowhere.subscribe", errors)
        self.assertIn("nothing was started", errors)
