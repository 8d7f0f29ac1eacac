"""Tests for ``monitor`` beside a deployment of stock processes."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import (
    Chat,
    OurProcess,
    eventually,
    new_deployment,
)
from tests.support.synapse_process import WorkerSpec

skip = skip_reason("synapse")

PROCESSES = ("master", "persister1", "persister2", "writer1", "sync1")
#: The time within which a monitor names an instance that has died, in s.
NAMED_WITHIN = 15.0


class MonitorTests(SynchronousTestCase):
    """Five stock processes, and a monitor that knows only their files."""

    def setUp(self) -> None:
        self.redis = PrivateRedis().start()
        self.addCleanup(self.redis.stop)
        self.deployment = new_deployment(
            self.redis,
            [WorkerSpec(name, ("client",)) for name in PROCESSES[1:]],
            {
                "events": ["persister1", "persister2"],
                "typing": ["writer1"],
                "receipts": ["writer1"],
                "to_device": ["writer1"],
            },
        )
        self.addCleanup(self.deployment.stop)
        self.deployment.start()
        self.port = free_port()
        files = [self.deployment.config_file]
        files += [self.deployment.worker_file(name) for name in PROCESSES[1:]]
        arguments = [part for file in files for part in ("-c", str(file))]
        self.monitor = OurProcess(
            Path(self.mktemp()), "monitor", *arguments, "--port", str(self.port)
        )
        self.addCleanup(self.monitor.stop)
        eventually("the monitor is ready", lambda: self.get("ready") != "ready\n")

    def get(self, path: str) -> str:
        url = f"http://127.0.0.1:{self.port}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                text: str = response.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
        except OSError as error:
            text = str(error)
        return text

    def status(self) -> Any:
        return json.loads(self.get("status.json"))

    def problems(self) -> dict[str, str]:
        """Return the problems of instances, by name."""
        return {
            each["instance_name"]: each["problem"]
            for each in self.status()["instances"]
            if each["problem"]
        }

    def alarms(self) -> str:
        """Return what is wrong with the deployment, as JSON."""
        status = self.status()
        wrong = {
            name: status[name]
            for name in ("not_ready", "stuck_ids", "unannounced", "duplicates")
        }
        wrong["problems"] = self.problems()
        return json.dumps({name: each for name, each in wrong.items() if each})

    def test_traffic_and_kills(self) -> None:
        """Traffic and restarts raise no false alarm; each killed process is named."""
        instances = {
            each["instance_name"]: each["state"] for each in self.status()["instances"]
        }
        self.assertEqual(instances, dict.fromkeys(PROCESSES, "stock"))
        chat = Chat.begin(self.deployment)
        for _ in range(20):
            chat.do_everything()
            self.assertEqual(self.alarms(), "{}")
        for name in PROCESSES:
            process = self.deployment.processes[name]
            process.kill()
            killed = time.monotonic()
            eventually(
                f"{name} is named",
                lambda name=name: list(self.problems()) != [name],  # type: ignore[misc]
                NAMED_WITHIN,
            )
            print(f"{name} named after {time.monotonic() - killed:.1f} s")  # noqa: T201
            self.assertIn(f"{name}: ", self.get("ready"))
            metric = f'synapse_replication_instance_up{{instance_name="{name}"'
            (line,) = [
                line
                for line in self.get("metrics").splitlines()
                if line.startswith(metric)
            ]
            self.assertTrue(line.endswith(" 0.0"), line)
            process.start()
            eventually("all are well", lambda: self.alarms() != "{}" and self.alarms())
        self.redis.restart()
        eventually("all are well", lambda: self.alarms() != "{}" and self.alarms())
        for _ in range(10):
            chat.do_everything()
        time.sleep(40)
        self.assertEqual(self.alarms(), "{}")

    def test_frozen(self) -> None:
        """A process that is stopped, and thus accepts connections, is named, too."""
        process = self.deployment.processes["writer1"]
        process.send_signal(signal.SIGSTOP)
        self.addCleanup(process.send_signal, signal.SIGCONT)
        eventually(
            "writer1 is named",
            lambda: list(self.problems()) != ["writer1"],
            NAMED_WITHIN,
        )
        process.send_signal(signal.SIGCONT)
        eventually("all are well", lambda: self.alarms() != "{}" and self.alarms())
