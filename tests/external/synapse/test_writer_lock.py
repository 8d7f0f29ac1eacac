"""Tests for two processes of a real Synapse with one name."""

from __future__ import annotations

import subprocess

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import new_deployment
from tests.support.synapse_process import WorkerSpec, ours

skip = skip_reason("synapse")

REFUSAL = "another process writes as persister1"


class WriterLockTests(SynchronousTestCase):
    """A process that persists events is started twice."""

    def test_second_process(self) -> None:
        """
        The second process refuses to start, and names the holder and the option that
        overrides this; with the option, it gets as far as the port of the first.
        """
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        deployment = new_deployment(
            redis,
            [WorkerSpec("persister1", ("client",))],
            {"events": ["persister1"]},
            dict.fromkeys(("master", "persister1"), ours()),
        )
        self.addCleanup(deployment.stop)
        deployment.start()

        def start_second(*options: str) -> str:
            files = (deployment.config_file, deployment.worker_file("persister1"))
            arguments = [part for file in files for part in ("-c", str(file))]
            done = subprocess.run(
                ours(*options)("synapse.app.generic_worker", arguments),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=deployment.directory,
                timeout=120,
                check=False,
            )
            self.assertNotEqual(done.returncode, 0)
            return done.stdout.decode()

        refused = start_second()
        self.assertIn(REFUSAL, refused)
        self.assertIn("pg_terminate_backend", refused)
        self.assertIn("exec --no-writer-lock", refused)
        self.assertTrue(deployment.processes["persister1"].is_running)

        started = start_second("--no-writer-lock")
        self.assertNotIn(REFUSAL, started)
        self.assertIn("in use", started)
