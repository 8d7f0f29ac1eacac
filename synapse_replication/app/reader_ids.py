"""Delivered positions of each writer, for a stream whose rows are in the database.

An id generator knows which ids were *committed* (``stream_positions``). A process that
delivers rows to a sink must know which rows were *delivered*, because rows that were
committed while it was down are still to be fetched. Therefore the positions of other
writers are tracked here; the position of this process is that of its id generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from synapse_replication.errors import StreamConfigurationError
from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.lost_answers import LostAnswer
from synapse_replication.storage.postgres_stream import PostgresStream, WriterIds
from synapse_replication.storage.transactions import Transaction
from synapse_replication.streams.reader import Reader
from synapse_replication.streams.reader_table import State


@attrs.define(eq=False, repr=False)
class ReaderIds:
    """The positions in a stream, for a process that reads the stream.

    An object of this class is passed to
    :class:`~synapse_replication.storage.postgres_stream.PostgresStream` as its ``ids``.

    :param stream_name: the stream, for errors.
    :param instance_name: the name of this process.
    :param delivered: for each other writer, the token up to which its rows were
        delivered; positive even if the ids are negative. It is updated.
    :param own: the id generator; ``None`` if this process does not write the stream.
    :param sign: that of the stream's ids: 1 or -1.
    :ivar unknown: the token for every other writer that is not in ``delivered``.
    """

    _stream_name: str
    _instance_name: str
    _delivered: dict[str, int]
    unknown: int
    _own: WriterIds | None
    _sign: int = attrs.field(default=1, kw_only=True)

    def get_next_txn(self, txn: Transaction) -> int:
        """Allocate an id that is finished when ``txn`` commits or rolls back.

        :raises StreamConfigurationError: if this process does not write the stream.
        """
        return self._generator().get_next_txn(txn)

    def get_current_token_for_writer(self, instance_name: str) -> int:
        """Return a writer's delivered position, as an id.

        For this process, if it writes the stream, return the id up to which its ids are
        finished.
        """
        if self._own is not None and instance_name == self._instance_name:
            return self._own.get_current_token_for_writer(instance_name)
        return self._sign * self._delivered.get(instance_name, self.unknown)

    def get_announceable_token(self) -> int:
        """Return the position that this process may announce, as an id."""
        if self._own is None:
            return self.get_current_token_for_writer(self._instance_name)
        return self._own.get_announceable_token()

    def get_delivered(self) -> Mapping[str, int]:
        """Return the delivered position of each known other writer, as a token."""
        me = self._instance_name
        return {name: token for name, token in self._delivered.items() if name != me}

    def get_minimal_local_current_token(self) -> int:
        """Return this process's greatest finished id that may be announced.

        :raises StreamConfigurationError: if this process does not write the stream.
        """
        return self._generator().get_minimal_local_current_token()

    def advance(self, instance_name: str, new_id: int) -> None:
        """Record another writer's delivered position, which is an id."""
        self._delivered[instance_name] = self._sign * new_id
        if self._own is not None:
            self._own.advance(instance_name, new_id)

    def _generator(self) -> WriterIds:
        if self._own is None:
            raise StreamConfigurationError(
                f"{self._instance_name} does not write {self._stream_name}; add it to "
                "the writers of the stream"
            )
        return self._own


@attrs.frozen(eq=False, repr=False)
class ReadStreamIds:
    """The ids of a stream, as a process that only reads it knows them.

    :ivar instance_name: the name of this process.
    :ivar stream: the stream.
    :ivar database: runs transactions.
    :param reader: the same stream, as it is read.
    :param readers: returns the readers of all writers, by (stream, writer).
    """

    instance_name: str
    stream: IdStream
    database: TransactionRunner
    _reader: PostgresStream
    _readers: Callable[[], Mapping[tuple[str, str], Reader]]

    def get_first_unfinished(self) -> tuple[int, str] | None:
        """Return the id that a writer holds back, and that writer.

        If its rows do not arrive, the reason is with the reader, which reports that.
        """
        found = self._reader.get_first_unfinished()
        if found is None:
            return None
        reader = self._readers().get((self._reader.description.name, found[1]))
        is_live = reader is not None and reader.state is State.LIVE
        return found if is_live else None

    def lost_answers(self) -> Sequence[LostAnswer]:
        """Return no transaction: this process does not write the stream."""
        return ()
