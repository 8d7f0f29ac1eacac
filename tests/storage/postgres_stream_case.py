"""A table with a stream and its ids, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg2
from twisted.internet import defer
from twisted.internet.defer import Deferred

from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.postgres_stream import PostgresStream, WriterIds
from synapse_replication.storage.transactions import Transaction
from synapse_replication.streams.stream import Stream
from synapse_replication.streams.table import TableStream

T = TypeVar("T")


class ImmediateDatabase:
    """Runs each transaction synchronously, on one connection."""

    def __init__(self, connection: psycopg2.extensions.connection) -> None:
        self.connection = connection
        self.transactions: list[str] = []
        #: Those that need neither BEGIN nor COMMIT.
        self.with_autocommit: list[str] = []

    def transact(
        self, description: str, func: Callable[[Any], T], *, autocommit: bool = False
    ) -> Deferred[T]:
        self.transactions.append(description)
        if autocommit:
            self.with_autocommit.append(description)
        try:
            with (
                self.connection,
                self.connection.cursor(cursor_factory=Transaction) as txn,
            ):
                return defer.succeed(func(txn))
        except psycopg2.Error:
            return defer.fail()


class CountingIds:
    """Returns consecutive ids, as from a sequence without other users."""

    def __init__(self, sign: int = 1) -> None:
        self.sign = sign
        self.last = 1
        self.others: dict[str, int] = {}

    def get_next_txn(self, txn: Transaction) -> int:
        self.last += 1
        return self.sign * self.last

    def get_current_token_for_writer(self, instance_name: str) -> int:
        if instance_name == "w1":
            return self.sign * max(self.last, *map(abs, self.others.values()), 1)
        return self.others.get(instance_name, self.sign)

    def get_announceable_token(self) -> int:
        return self.get_current_token_for_writer("w1")

    def get_minimal_local_current_token(self) -> int:
        return self.sign * self.last

    def advance(self, instance_name: str, new_id: int) -> None:
        self.others[instance_name] = new_id


if TYPE_CHECKING:
    _stream: type[Stream] = PostgresStream
    _database: type[TransactionRunner] = ImmediateDatabase
    _ids: type[WriterIds] = CountingIds


ORDERS = TableStream(
    name="orders",
    table="orders",
    id_column="stream_id",
    writer_column="writer",
    columns={"item": str, "amount": int | None},
    sequence="orders_seq",
    writers=["w1", "w2"],
)


SCHEMA = """
CREATE TABLE orders (
    stream_id bigint NOT NULL, writer text NOT NULL, item text NOT NULL, amount
    integer);
CREATE INDEX orders_by_writer ON orders (writer, stream_id);
CREATE SEQUENCE orders_seq;
SELECT setval('orders_seq', 1000000);
CREATE TABLE stream_positions (
    stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL);
CREATE UNIQUE INDEX stream_positions_idx
    ON stream_positions (stream_name, instance_name);
"""
