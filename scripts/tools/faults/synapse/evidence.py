"""Collects commits and deliveries from outside the processes.

Theory of operation: triggers in the deployment's database record every row of the
judged tables, in the transaction that writes it. Rows of streams in memory are
requested from their writer. The deliveries to each process are read from the log of its
witness.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import psycopg2

from scripts.tools.faults.synapse.cluster import Cluster
from scripts.tools.faults.synapse.deployments import TABLES, TYPING, WRITER
from scripts.tools.faults.synapse.verdict import (
    Committed,
    Delivery,
    Epoch,
    missing_rows,
    received_by_none,
)
from synapse_replication.errors import ReplicationError
from synapse_replication.streams.standard.registry import (
    MAIN_INSTANCE,
    STANDARD_STREAMS,
)

#: The number of recent rows that each query reads again, because transactions may
#: commit out of order.
_OVERLAP = 2000

_SCHEMA = """
    CREATE SCHEMA witness;
    CREATE TABLE witness.rows (
        n BIGSERIAL PRIMARY KEY, stream TEXT, token BIGINT, writer TEXT,
        at DOUBLE PRECISION
    );
    CREATE FUNCTION witness.note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO witness.rows (stream, token, writer, at) VALUES (
                TG_ARGV[0],
                (to_jsonb(NEW)->>TG_ARGV[1])::bigint,
                coalesce(to_jsonb(NEW)->>'instance_name', TG_ARGV[2]),
                extract(epoch FROM clock_timestamp())
            );
            RETURN NULL;
        END
    $$;
"""

_TRIGGER = """
    CREATE TRIGGER witness AFTER INSERT OR UPDATE OF {column} ON {table}
        FOR EACH ROW EXECUTE FUNCTION witness.note('{stream}', '{column}', '{main}');
"""


def read_witness(line: str, starts: Sequence[float]) -> tuple[Any, ...]:
    """Parse a line of a witness's log.

    :param starts: the times of restarts of the writer of typing, in s since the Unix
        epoch.
    :return: ``("start", time, positions)`` or ``("rows", time, (delivery, writer))``.
    """
    kind, at, *values = json.loads(line)
    if kind == "start":
        return kind, at, values[0]
    stream, writer, token, _ = values
    era = bisect(starts, at) if stream == TYPING else 0
    return kind, at, (Delivery(stream, token, era), writer)


@attrs.define(eq=False)
class _Log:
    """The log of one epoch of a process, which is read as it grows."""

    path: Path
    process: str
    pid: int
    epoch: Epoch | None = None
    _offset: int = 0

    def read_new_lines(self, is_ours: bool, starts: Sequence[float]) -> None:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].decode().splitlines():
            kind, at, value = read_witness(line, starts)
            if kind == "start":
                self.epoch = Epoch(self.process, is_ours, at, value)
            else:
                assert self.epoch is not None
                delivery, writer = value
                self.epoch.deliver(delivery, writer, at)


class Evidence:
    """Collects evidence about a cluster.

    :param cluster: a running cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rows: dict[Delivery, Committed] = {}
        self._newest = 0
        self._logs: dict[str, _Log] = {}
        #: The newest row of each room in the writer's last response.
        self._typing: set[Delivery] = set()
        self._given_up: set[tuple[Epoch, Delivery]] = set()
        cluster.query(_SCHEMA + "".join(_triggers()))

    @property
    def rows(self) -> Sequence[Committed]:
        """The committed rows."""
        return list(self._rows.values())

    @property
    def epochs(self) -> Sequence[Epoch]:
        """All epochs of all processes."""
        return [log.epoch for log in self._logs.values() if log.epoch is not None]

    def collect(self) -> bool:
        """Read new evidence.

        :return: whether the database and the writer responded.
        """
        self._read_logs()
        return self._read_typing() and self._read_rows()

    def missing(self, until: float) -> list[tuple[Epoch, Committed]]:
        """Return rows that were written before ``until`` and are not delivered.

        :param until: a time in s since the Unix epoch.
        :raises psycopg2.Error: if the database is down.
        """
        rows = [row for row in self._rows.values() if row.at <= until]
        typing = {TYPING: self._typing}
        missing = missing_rows(rows, self.epochs, typing)
        if missing:
            streams = {row.stream for _, row in missing} - {TYPING}
            rows = list({row.delivery: row for _, row in missing}.values())
            missing = missing_rows(rows, self.epochs, self.present(streams) | typing)
        return missing

    def new_missing(self, until: float) -> list[tuple[Epoch, Committed]]:
        """Return missing rows, without those that :meth:`end_round` returned.

        While the database is down, return none.

        :param until: as for :meth:`missing`.
        """
        try:
            missing = self.missing(until)
        except psycopg2.Error:
            return []
        return [
            (epoch, row)
            for epoch, row in missing
            if epoch.is_running and (epoch, row.delivery) not in self._given_up
        ]

    def judge_until(self, at: float) -> None:
        """Make the rows written until now due to the processes that run.

        Otherwise they are not due to those of them that end later.

        :param at: the present time, or when a fault ended, in s since the Unix epoch.
        """
        for epoch in self.epochs:
            if epoch.is_running:
                epoch.judged_until = at

    def end_round(self, fault_ended: float) -> list[tuple[Epoch, Committed]]:
        """Stop waiting for the rows that are missing now; they are judged at the end.

        :param fault_ended: when the fault ended, in s since the Unix epoch. Rows
            written before that are due to each process that is running now, even if it
            ends later.
        :return: the missing rows.
        """
        self.judge_until(fault_ended)
        missing = self.new_missing(time.time())
        self._given_up.update((epoch, row.delivery) for epoch, row in missing)
        return missing

    def unannounced(
        self, within: float = math.inf
    ) -> tuple[list[Committed], list[Committed]]:
        """Return the rows that no process received: those that exist, and the others.

        Rows of streams in memory are omitted.

        :param within: the time from writing a row within which it counts as received,
            in s.
        :raises psycopg2.Error: if the database is down.
        """
        present = self.present(TABLES)
        found: tuple[list[Committed], list[Committed]] = [], []
        for row in received_by_none(self.rows, self.epochs, within):
            if row.stream in present:
                found[row.delivery not in present[row.stream]].append(row)
        return found

    def present(self, streams: Iterable[str]) -> dict[str, Collection[Delivery]]:
        """Return the rows that are in the tables now, by stream.

        :raises psycopg2.Error: if the database is down.
        """
        present: dict[str, Collection[Delivery]] = {}
        for stream in streams:
            if stream == TYPING:
                present[stream] = self._typing
                continue
            present[stream] = {
                Delivery(stream, token)
                for table in TABLES[stream]
                for (token,) in self._cluster.query(
                    f"SELECT {_id_column(stream, table)} FROM {table}"
                )
            }
        return present

    def _read_logs(self) -> None:
        cluster = self._cluster
        for path in cluster.witness_folder.iterdir():
            if path.name not in self._logs:
                process, pid, _ = path.name.rsplit(".", 2)
                self._logs[path.name] = _Log(path, process, int(pid))
        for log in self._logs.values():
            log.read_new_lines(cluster.is_ours(log.process), cluster.starts_of_writer)
            if log.epoch is not None:
                running = cluster.process(log.process)
                log.epoch.is_running = running.is_running and running.pid == log.pid

    def _read_rows(self) -> bool:
        try:
            found = self._cluster.query(
                "SELECT n, stream, token, writer, at FROM witness.rows WHERE n > %s",
                self._newest - _OVERLAP,
            )
        except psycopg2.Error:
            return False
        for number, stream, token, writer, at in found:
            # Negative ids belong to events from before a user joined.
            if token > 0:
                row = Committed(stream, token, writer, at)
                self._rows.setdefault(row.delivery, row)
            self._newest = max(self._newest, number)
        return True

    def _read_typing(self) -> bool:
        cluster = self._cluster
        era = len(cluster.starts_of_writer)
        try:
            newest = cluster.fetch_typing()
        except (OSError, ReplicationError):
            return False
        self._typing = {Delivery(TYPING, token, era) for token in newest}
        for token in newest:
            row = Committed(TYPING, token, WRITER, time.time(), era)
            self._rows.setdefault(row.delivery, row)
        return True


def _id_column(stream: str, table: str) -> str:
    (column,) = (
        column.id_column
        for column in STANDARD_STREAMS[stream].id_columns
        if column.table == table
    )
    return column


def _triggers() -> Iterable[str]:
    for stream, tables in TABLES.items():
        for table in tables:
            yield _TRIGGER.format(
                table=table,
                stream=stream,
                column=_id_column(stream, table),
                main=MAIN_INSTANCE,
            )
