"""Records a deployment of a release: ``python -m tests.compatibility.record WHEEL``.

The command needs ``pg_dump`` beside PostgreSQL's other binaries.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

import hiredis
from rich.console import Console
from typing_extensions import override

from scripts.tools.faults.skew import unpack
from synapse_replication.demo.course import run_demo
from synapse_replication.demo.deployment import (
    DATABASE,
    SERVER_NAME,
    DemoPlan,
    Deployment,
)
from synapse_replication.demo.display import TextScreen
from synapse_replication.demo.script import read_script
from synapse_replication.recordings.reader import shipped_recording
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.testing.server_binaries import find_postgres

#: The number of rows, among which are rows of each stream, and the rows per second.
ROWS, RATE = 2000, 500.0
#: The text that replaces the path of the deployment's folder.
FOLDER = "@FOLDER@"


class _ReleaseDeployment(Deployment):
    """A deployment whose processes all run a release."""

    def __init__(self, program: list[str]) -> None:
        super().__init__(DemoPlan(shipped_recording(), ROWS, RATE, use_redis=True))
        self._program = program
        self._listener = threading.Thread(target=self._listen)
        self._connection: socket.socket | None = None
        #: The first message of each type of each process.
        self.messages: dict[tuple[str, str], str] = {}

    @override
    def start_servers(self) -> None:
        super().start_servers()
        for process in self.processes.values():
            process.program = self._program
        assert self.redis is not None
        self._connection = socket.create_connection((self.redis.host, self.redis.port))
        self._connection.sendall(f"PSUBSCRIBE {SERVER_NAME}/*\r\n".encode())
        self._listener.start()

    def _listen(self) -> None:
        assert self._connection is not None
        reader = hiredis.Reader()
        while data := self._connection.recv(65536):
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if reply[0] == b"pmessage":
                    text = reply[3].decode()
                    message = json.loads(text)
                    key = message["type"], message["instance"]
                    self.messages.setdefault(key, text)

    @override
    def close(self) -> None:
        super().close()
        if self._connection is not None:
            self._listener.join()
            self._connection.close()


def record(wheel: Path, target: Path) -> None:
    """Run a deployment of a wheel, and save its files.

    :raises subprocess.CalledProcessError: if a command of the release fails.
    :raises ReplicationError: if a process fails.
    """
    total = sum(len(write.rows) for write in read_script(shipped_recording(), ROWS))
    with (
        tempfile.TemporaryDirectory() as unpacked,
        tempfile.TemporaryDirectory() as saved,
    ):
        program = unpack(wheel, Path(unpacked))
        deployment = _ReleaseDeployment(program)
        try:
            tallies = run_demo(
                deployment, TextScreen(Console()), total, with_faults=True
            )
            assert all(tally.is_good for tally in tallies), tallies
            folder, out = deployment.directory, Path(saved)
            configs = [folder / "homeserver.yaml", folder / f"{MAIN_INSTANCE}.yaml"]
            subprocess.run(
                [
                    *(*program, "pipeline", "archive", "--once"),
                    *("--archive", str(out / "archive")),
                    *(part for file in configs for part in ("-c", str(file))),
                ],
                check=True,
            )
            dump = subprocess.run(
                [
                    *(find_postgres() / "pg_dump", "--inserts", "--no-owner"),
                    deployment.postgres.dsn(DATABASE),
                ],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            # Commands of psql are not SQL.
            lines = [line for line in dump.splitlines() if not line.startswith("\\")]
            (out / "database.sql").write_text("\n".join(lines) + "\n")
            for file in (*folder.glob("*.yaml"), *folder.glob("*.journal.jsonl")):
                text = file.read_text().replace(str(folder), FOLDER)
                (out / file.name).write_text(text)
            (out / "extension.jsonl").write_text(
                "".join(f"{text}\n" for text in deployment.messages.values())
            )
        finally:
            deployment.close()
        with tarfile.open(target, "w:xz") as archive:
            for path in sorted(out.iterdir()):
                archive.add(path, path.name)


if __name__ == "__main__":
    version = Path(sys.argv[1]).name.split("-")[1]
    record(Path(sys.argv[1]).absolute(), Path(__file__).with_name(f"{version}.tar.xz"))
