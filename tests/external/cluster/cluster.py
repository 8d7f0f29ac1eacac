"""A standalone Spark cluster on this machine, from the pip-installed Spark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from synapse_replication.pipeline.spark.session import make_session
from synapse_replication.testing.private_process import free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"

#: In the log of a worker.
_REGISTERED = "Successfully registered with master"

#: Timeout in s for the master to register a worker.
START_TIMEOUT = 600.0


class StandaloneCluster:
    """A master and workers with one core each.

    They run in folders of their own, so everything that executors import must be
    installed.

    :param folder: for logs and work; created if missing.
    :ivar url: the value for ``--master``.
    """

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._workers = workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starts = 0
        self._port = free_port()
        self.url = f"spark://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start all processes, and wait until the workers are registered."""
        self._start(
            "master",
            _MASTER,
            *("--host", "127.0.0.1", "--port", str(self._port), "--webui-port", "0"),
        )
        names = [self._start_worker() for _ in range(self._workers)]
        for name in names:
            self._wait_for(name, _REGISTERED)

    def make_session(
        self, name: str, settings: Mapping[str, str] | None = None
    ) -> SparkSession:
        """Return a session whose executors run here, with further settings of Spark."""
        return make_session(
            name,
            master=self.url,
            settings={
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.executor.memory": "512m",
                "spark.cores.max": "2",
                **(settings or {}),
            },
        )

    def stop(self) -> None:
        """Terminate all processes; executors end with their workers."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def kill_worker(self, number: int) -> None:
        """Kill a worker and its executor at once.

        :param number: the number of the worker, from 1.
        """
        worker = self._processes[number]
        children = Path(f"/proc/{worker.pid}/task").glob("*/children")
        executors = " ".join(path.read_text() for path in children).split()
        for pid in (worker.pid, *map(int, executors)):
            os.kill(pid, signal.SIGKILL)

    def replace_worker(self, number: int) -> None:
        """Start a worker instead of one that was killed, and wait until it registers.

        :param number: the number of the killed worker; the new one has it, too.
        """
        self._processes.pop(number).wait()
        name = self._start_worker()
        self._processes.insert(number, self._processes.pop())
        self._wait_for(name, _REGISTERED)

    def _start_worker(self) -> str:
        self._starts += 1
        name = f"worker{self._starts}"
        self._start(
            name,
            _WORKER,
            *("--host", "127.0.0.1", "--cores", "1", "--memory", "1g"),
            *("--webui-port", "0", self.url),
        )
        return name

    def _start(self, name: str, main_class: str, *arguments: str) -> None:
        folder = self._folder / name
        folder.mkdir(parents=True)
        # Imported in the function: the module must be importable without Spark.
        import pyspark

        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_WORKER_DIR": str(folder),
            "PYSPARK_PYTHON": sys.executable,
        }
        with (folder / "log").open("wb") as log:
            # spark-class executes Java in its own process, so the process id is Java's.
            self._processes.append(
                subprocess.Popen(
                    [str(home / "bin" / "spark-class"), main_class, *arguments],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def _wait_for(self, name: str, text: str) -> None:
        log = self._folder / name / "log"
        deadline = time.monotonic() + START_TIMEOUT
        while text not in log.read_text(errors="replace"):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{name} did not start: {log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.1)
