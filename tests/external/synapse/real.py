"""Helpers for the tests: a deployment, our own processes, and users who write."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import hiredis
import psycopg2
import psycopg2.extensions

from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.private_process import die_with_parent
from synapse_replication.testing.servers import PrivateRedis, shared_postgres
from synapse_replication.wire.extension import (
    CHANNEL,
    ExtensionMessage,
    MessageType,
    parse_message,
)
from tests.support.client_api import (
    ApiError,
    ApiUser,
    timeline_messages,
)
from tests.support.synapse_peer import SynapseDeployment
from tests.support.synapse_process import Launcher, WorkerSpec

#: Timeout in s for anything that must happen.
PATIENCE = 60.0


def new_deployment(
    redis: PrivateRedis,
    workers: Sequence[WorkerSpec],
    stream_writers: Mapping[str, Sequence[str]],
    launchers: Mapping[str, Launcher] | None = None,
    settings: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> SynapseDeployment:
    """Return a deployment with a database of its own."""
    dsn = shared_postgres().new_database()
    return SynapseDeployment(
        database=psycopg2.extensions.parse_dsn(dsn),
        redis={"host": redis.host, "port": redis.port},
        workers=workers,
        stream_writers=stream_writers,
        launchers=launchers,
        settings=settings,
        environ=environ,
    )


def query(deployment: SynapseDeployment, sql: str) -> list[tuple[Any, ...]]:
    """Query the deployment's database."""
    connection = psycopg2.connect(**deployment.database)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())
    finally:
        connection.close()


def stored_positions(deployment: SynapseDeployment) -> dict[tuple[str, str], int]:
    """Return ``stream_positions`` by (name on the wire, writer)."""
    names = {
        stream.positions_name: name
        for name, stream in STANDARD_STREAMS.items()
        if stream.positions_name is not None
    }
    rows = query(
        deployment, "SELECT stream_name, instance_name, stream_id FROM stream_positions"
    )
    return {(names[name], writer): abs(token) for name, writer, token in rows}


def eventually(
    what: str, check: Callable[[], object], patience: float = PATIENCE
) -> None:
    """Wait until a check passes.

    :param check: returns a false value once it passes, else the difference.
    """
    deadline = time.monotonic() + patience
    while wrong := check():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: {wrong}")
        time.sleep(0.1)


class OurProcess:
    """A ``synapse-replication`` process.

    :ivar output: the path of its standard output.
    """

    def __init__(self, output: Path, *arguments: str) -> None:
        self.output = output
        self._errors = output.with_suffix(".err")
        with output.open("ab") as out, self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "synapse_replication", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    # Modules of tests may be configured.
                    "PYTHONPATH": str(Path(__file__).parents[3]),
                },
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    def errors(self) -> str:
        """Return the standard error of the process."""
        return self._errors.read_text("utf-8", "replace")

    def is_running(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def stop(self) -> int:
        """Stop the process with SIGTERM and return its exit status."""
        if self.is_running():
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


def json_lines(path: Path) -> Iterator[Any]:
    """Yield the complete JSON lines of a file."""
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            if line.startswith(b"{"):
                yield json.loads(line)


@attrs.define
class Chat:
    """Two users in a room who use every feature.

    :ivar alice: talks to the main process.
    :ivar bob: talks to the main process.
    :ivar sent: the texts of the messages, in order.
    """

    deployment: SynapseDeployment
    alice: ApiUser
    bob: ApiUser
    room_id: str
    sent: list[str] = attrs.Factory(list)
    _rounds: int = 0
    _counter: int = 0

    @classmethod
    def begin(cls, deployment: SynapseDeployment, number: int = 1) -> Chat:
        """Register the users and create the room.

        :param number: distinguishes their names from those of other chats.
        """
        alice = deployment.register(f"alice{number}")
        bob = deployment.register(f"bob{number}")
        room_id = alice.create_room(bob)
        bob.join(room_id)
        return cls(deployment, alice, bob, room_id)

    def send_messages(self, count: int) -> str:
        """Send messages and return the event id of the last one."""
        event_id = ""
        for _ in range(count):
            text = f"message {len(self.sent)}"
            event_id = self.alice.send_message(self.room_id, text)
            self.sent.append(text)
        return event_id

    def do_everything(self, messages: int = 5) -> None:
        """Write to every stream that clients can write to."""
        self._rounds += 1
        number = self._rounds
        alice, bob, room_id = self.alice, self.bob, self.room_id
        event_id = self.send_messages(messages)
        alice.redact(room_id, alice.create_note(room_id, f"note {number}"))
        typist = self._at("typing", alice)
        typist.set_typing(room_id)
        typist.set_typing(room_id, typing=False)
        self._at("receipts", bob).read_up_to(room_id, event_id)
        alice.set_presence("online", f"round {number}")
        alice.set_account_data("org.example.round", {"number": number})
        alice.set_room_tag(room_id, f"u.round{number}")
        alice.set_push_rule(f"word{number}")
        alice.set_pusher(f"key{number}")
        alice.set_display_name(f"Alice {number}")
        self._at("to_device", alice).send_to_device(bob, f"hello {number}")
        alice.upload_device_keys()

    def _at(self, stream_name: str, user: ApiUser) -> ApiUser:
        """
        Return a user connected to a writer of the stream, as some requests require.
        """
        writers = self.deployment.stream_writers.get(stream_name)
        if not writers:
            return user
        return user.at(self.deployment.processes[writers[0]].api)

    def shown_by(self, worker: str) -> list[str]:
        """Return the texts that ``/sync`` on a worker shows to a new client."""
        user = self.bob.at(self.deployment.processes[worker].api)
        # Identical requests are answered from a cache for two minutes.
        self._counter += 1
        return timeline_messages(user.sync(limit=10_000 + self._counter), self.room_id)


class MessageSender:
    """Sends messages to a chat continuously in a thread, whatever is restarted.

    A message that was not accepted is sent again as the same request.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._talk)

    def __enter__(self) -> MessageSender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()

    def wait_for(self, more: int) -> None:
        """Wait until ``more`` further messages are accepted."""
        target = len(self._chat.sent) + more
        eventually("talking", lambda: target - len(self._chat.sent) > 0)

    def _talk(self) -> None:
        chat = self._chat
        while not self._enough.wait(0.02):
            text = f"message {len(chat.sent)}"
            while not self._is_accepted(text):
                self._enough.wait(0.1)
            chat.sent.append(text)

    def _is_accepted(self, text: str) -> bool:
        chat = self._chat
        try:
            chat.alice.send_message(chat.room_id, text, text.replace(" ", "."))
        except (ApiError, OSError):
            return False
        return True


class Listener:
    """Subscribes to the extension's channel, in a thread.

    :ivar messages: the messages received, in order.
    """

    def __init__(self, redis: PrivateRedis, server_name: str) -> None:
        self.messages: list[ExtensionMessage] = []
        self._socket = socket.create_connection((redis.host, redis.port))
        self._socket.sendall(f"SUBSCRIBE {server_name}/{CHANNEL}\r\n".encode())
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        reader = hiredis.Reader()
        while data := self._socket.recv(65536):
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if reply[0] == b"message":
                    self.messages.append(parse_message(reply[2]))

    def stop(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def epochs(self, name: str) -> list[str]:
        """Return the epochs of a process, in the order of their arrival."""
        return list(
            dict.fromkeys(m.epoch for m in self.messages if m.instance_name == name)
        )

    def messages_of(self, name: str, kind: MessageType) -> list[ExtensionMessage]:
        """Return a process's messages of one type."""
        return [m for m in self.messages if m.instance_name == name and m.type is kind]
