"""The same service with this package: ``writer1``, ``writer2`` or ``consumer``."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet import reactor  # noqa: TID251 -- a program
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.task import deferLater
from typing_extensions import override

from scripts.tools.alternatives.service import (
    FULL_SPEED,
    PACE,
    THREADS,
    WORK,
    Received,
    Row,
)
from synapse_replication import api

WRITERS = ("writer1", "writer2")
MOVEMENTS = api.TableStream(
    name="movements",
    table="movements",
    id_column="stream_id",
    writer_column="instance_name",
    sequence="movements_seq",
    columns={"item": "text"},
    writers=WRITERS,
)


class Consumer:
    """The sink: appends rows and positions to the file of the consumer."""

    def __init__(self, path: Path) -> None:
        self._received = Received(path)

    def saved_positions(self) -> Mapping[tuple[str, str], int]:
        """Return the last position of each writer."""
        saved = self._received.position or {}
        return {("movements", writer): token for writer, token in saved.items()}

    def on_rdata(self, stream: str, writer: str, token: int, rows: list[Any]) -> None:
        """Append the rows of one token."""
        self._add(writer, token, [Row(token, writer, row.item) for row in rows])

    def on_position(self, stream: str, writer: str, token: int) -> None:
        """Append a position."""
        self._add(writer, token, [])

    def _add(self, writer: str, token: int, rows: list[Row]) -> None:
        saved = self._received.position or {}
        self._received.add(rows, {**saved, writer: token})


class Writer(Service):
    """Writes rows in several transactions at the same time."""

    def __init__(self, replication: api.Replication, name: str, folder: Path) -> None:
        self._replication = replication
        self._folder = folder
        self._commits = (folder / f"{name}.commits").open("ab", buffering=0)
        self._numbers = count()
        self._work: Any = None

    @override
    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._work = DeferredList(
            [Deferred.fromCoroutine(self._write()) for _ in range(THREADS)]
        )

    @override
    def stopService(self) -> Any:
        super().stopService()  # type: ignore[no-untyped-call]
        return self._work

    async def _write(self) -> None:
        chance, due = random.Random(), time.monotonic()
        stream = self._replication[MOVEMENTS]
        make_row = stream.description.codec.row_type
        while self.running:
            pace = float((self._folder / PACE).read_text() or 0)
            if not pace:
                await deferLater(reactor, 0.05)
                due = time.monotonic()
                continue
            due = max(due + THREADS / pace, time.monotonic() - 1)
            await deferLater(reactor, max(0.0, due - time.monotonic()))
            row = make_row(item=f"{os.getpid()}-{next(self._numbers)}")

            work = chance.uniform(*WORK) if pace < FULL_SPEED else 0.0
            insert = partial(_insert, stream=stream, row=row, work=work)
            token = await self._replication.database.transact("movement", insert)
            self._commits.write(b"%d %f\n" % (token, time.time()))


def _insert(txn: Any, *, stream: Any, row: Any, work: float) -> int:
    token: int = stream.write_txn(txn, [row])
    time.sleep(work)
    return token


def make_service(name: str, settings: Mapping[str, Any]) -> api.Replication:
    """Return the service of a process."""
    options = api.ReplicationOptions(
        server_name="depot.example.com",
        instance_name=name,
        streams=[MOVEMENTS],
        database=settings["dsn"],
        redis=api.RedisOptions(host="127.0.0.1", port=settings["redis"]),
        instances={
            writer: api.InstanceLocation("127.0.0.1", port)
            for writer, port in zip(WRITERS, settings["ports"], strict=True)
        },
        secret="a long random text",
    )
    folder = Path(settings["folder"])
    if name in WRITERS:
        replication = api.Replication(reactor, options)
        writer: Any = Writer(replication, name, folder)
        writer.setServiceParent(replication.services)
        return replication
    return api.Replication(reactor, options, Consumer(folder / "received"))


if __name__ == "__main__":
    api.start_logging(sys.stderr)
    sys.exit(
        api.run_service(
            reactor, lambda: make_service(sys.argv[1], json.loads(sys.argv[2]))
        )
    )
