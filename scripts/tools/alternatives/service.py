"""The service that each alternative implements: writers of a table, and a consumer.

A writer commits rows in several transactions at the same time, as the threads of any
service do: ids are allocated in one order, and committed in another. A consumer appends
what it receives to a file, together with the position at which it must continue, in one
write. It reads this file when it starts.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import attrs
import psycopg2

#: The table of all alternatives. Its ``xid`` is used by one of them.
SCHEMA = """
    CREATE SEQUENCE movements_seq START 2;
    CREATE TABLE movements (
        stream_id BIGINT NOT NULL, instance_name TEXT NOT NULL, item TEXT NOT NULL,
        xid XID8 NOT NULL DEFAULT pg_current_xact_id()
    );
    CREATE INDEX ON movements (instance_name, stream_id);
    CREATE INDEX ON movements (stream_id);
    CREATE INDEX ON movements (xid, stream_id);
"""
#: The transactions of a writer at the same time.
THREADS = 4
#: For how long a transaction works after it has inserted its row, in s.
WORK = (0.0, 0.03)
#: The file with the rows per second of each writer; 0 pauses it.
PACE = "pace"
#: The pace from which on writers write as fast as they can.
FULL_SPEED = 1e6
#: The pause before a failed connection is made again, in s.
RETRY = 0.1


@attrs.frozen
class Row:
    """A committed row."""

    token: int
    writer: str
    item: str

    @classmethod
    def decode(cls, text: str | bytes) -> Row:
        """Return the row that :meth:`encode` encoded."""
        return cls(*json.loads(text))

    def encode(self) -> str:
        """Return the row as text."""
        return json.dumps([self.token, self.writer, self.item])


class Received:
    """The file of a consumer: each line has rows, their time and a position."""

    def __init__(self, path: Path) -> None:
        self.position: Any = None
        for line in read_lines(path):
            self.position = line["position"]
        self._file = path.open("ab", buffering=0)

    def add(self, rows: Iterable[Row], position: Any) -> None:
        """Append rows and the position after them, in one write."""
        entry = {
            "at": time.time(),
            "rows": [[row.token, row.writer] for row in rows],
            "position": position,
        }
        self._file.write(json.dumps(entry).encode() + b"\n")
        self.position = position


def read_lines(path: Path) -> list[Any]:
    """Return the complete lines of a file of JSON."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


class Alternative:
    """One way to bring committed rows to a consumer.

    :param dsn: the database.
    :param port: the port of Redis or NATS.
    :ivar title: what it is, for the table.
    """

    title: ClassVar[str]

    def __init__(self, dsn: str, port: int) -> None:
        self.dsn = dsn
        self.port = port

    def in_transaction(self, cursor: Any, row: Row) -> None:
        """Announce a row in the transaction that inserts it."""

    def after_commit(self, row: Row) -> None:
        """Announce a row that was committed."""

    def consume(self, received: Received) -> None:
        """Receive rows for ever; return when the connection fails."""
        raise NotImplementedError


def write(alternative: Alternative, name: str, folder: Path) -> None:
    """Write rows in several threads for ever."""
    commits = (folder / f"{name}.commits").open("ab", buffering=0)
    numbers = itertools.count()

    def work() -> None:
        connection = psycopg2.connect(alternative.dsn)
        chance = random.Random()
        due = time.monotonic()
        while True:
            pace = float((folder / PACE).read_text() or 0)
            if not pace:
                time.sleep(0.05)
                due = time.monotonic()
                continue
            due = max(due + THREADS / pace, time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))
            item = f"{os.getpid()}-{next(numbers)}"
            with connection, connection.cursor() as cursor:
                cursor.execute("SELECT nextval('movements_seq')")
                ((token,),) = cursor.fetchall()
                row = Row(token, name, item)
                cursor.execute(
                    "INSERT INTO movements VALUES (%s, %s, %s)",
                    (row.token, row.writer, row.item),
                )
                alternative.in_transaction(cursor, row)
                if pace < FULL_SPEED:
                    time.sleep(chance.uniform(*WORK))
            commits.write(b"%d %f\n" % (row.token, time.time()))
            alternative.after_commit(row)

    for _ in range(THREADS):
        threading.Thread(target=work, daemon=True).start()
    signal.pause()


def consume(alternative: Alternative, folder: Path) -> None:
    """Receive rows for ever."""
    received = Received(folder / "received")
    while True:
        alternative.consume(received)
        time.sleep(RETRY)


def main(alternatives: dict[str, type[Alternative]]) -> None:
    """Run a writer or the consumer: ``NAME ROLE FOLDER DSN PORT``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    name, role, folder, dsn, port = sys.argv[1:]
    alternative = alternatives[name](dsn, int(port))
    if role == "consumer":
        consume(alternative, Path(folder))
    else:
        write(alternative, role, Path(folder))
