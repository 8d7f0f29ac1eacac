"""Adapts the host's own ``Stream`` objects to the interface of the handlers.

Theory of operation: the host's classes know their tables, their caches and their rows,
and supply tokens, pages and parsed rows. The rules of each stream come from the
registry of standard streams; its writers come from the host's configuration.

For streams in the database, and for ``federation``, the token up to which this process
has received another writer's rows is recorded here, per writer, and not read from the
host. The host's own value is at least the position that *all* writers have reached
together. A POSITION of one writer can advance that value past a row of another writer
that this process never received, and the other writer's POSITION would then look
redundant. The host's value is only the baseline of the recorded tokens: it is read
once, before any row or POSITION can be delivered, when no cache can be stale.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from synapse_replication.dropin.homeserver import (
    Homeserver,
    HomeserverStream,
    WorkerSettings,
)
from synapse_replication.dropin.settings import own_settings
from synapse_replication.errors import RowDecodeError
from synapse_replication.storage.id_generators import MultiWriterIdGenerator
from synapse_replication.streams.rows import DecodedRows, RawRowCodec, decode_json
from synapse_replication.streams.standard.registry import (
    MAIN_INSTANCE,
    STANDARD_STREAMS,
)
from synapse_replication.streams.stream import StreamDescription, StreamUpdateResult
from synapse_replication.streams.writer_positions import PLAUSIBLE_DISTANCE

#: A name that no instance has. For an unknown name, the host returns the position that
#: all writers have reached together.
_UNKNOWN_WRITER = ""

#: The key of the main process in ``instance_map``.
_MAIN_IN_MAP = "main"

#: How long this process's position in a stream is reused, in s, while ``get_mark()`` of
#: the id generator returns the same value: ``REUSE_SECONDS`` while the known value of
#: the sequence limits the position, otherwise ``KEEP_SECONDS``.
KEEP_SECONDS, REUSE_SECONDS = 10.0, 0.9

#: The id generators of this process, by instance name and sequence name. They register
#: themselves, because a host's streams have no reference to their generators.
generators: WeakValueDictionary[tuple[str, str], MultiWriterIdGenerator] = (
    WeakValueDictionary()
)


class HostRowCodec(RawRowCodec):
    """Decodes JSON text to the host's own row classes.

    The host supplies the rows to send as JSON values.
    """

    def __init__(self, stream_name: str, parse_row: Callable[[Any], Any]) -> None:
        super().__init__(stream_name)
        self.row_type = parse_row

    def decode(self, texts: Sequence[bytes | str]) -> DecodedRows[Any]:
        """Decode rows that arrived together.

        :raises RowDecodeError: if one of the texts is not a row of this stream.
        """
        rows = []
        for index, text in enumerate(texts):
            try:
                rows.append(self.row_type(decode_json(text)))
            except Exception as error:
                # The host's own class may raise anything for an invalid row.
                raise RowDecodeError(self.stream_name, index, repr(error)) from error
        return DecodedRows(rows)

    def from_json(self, value: Any) -> Any:
        """Return the row for a JSON value.

        :raises RowDecodeError: if ``value`` is not a row of this stream.
        """
        try:
            return self.row_type(value)
        except Exception as error:
            raise RowDecodeError(self.stream_name, 0, repr(error)) from error


class HostStream:
    """One of the host's streams, as a :class:`Stream`.

    :param stream: the host's own object.
    :param instance_name: the name of this process.
    :param writers: the declared writers; none if every instance may write.
    :param trusts_ids: whether the host's ids come from this package's generator, so
        that the host's answers about local updates are correct.
    :param ids: the generator of the stream's ids, if it belongs to this package and has
        a sequence; otherwise ``None``.
    :param plausible_distance: the maximum number of ids by which a plausible position
        may exceed the last value of the sequence, or (of a stream held in memory) the
        writer's current token.
    :param seconds: returns the time in s, for instance that of the reactor.
    :ivar original: the host's own object.
    :ivar ids: see above.
    :ivar is_limited: whether the known value of the sequence limits the position that
        this process announces, so that the sequence must be read.
    """

    def __init__(
        self,
        stream: HomeserverStream,
        instance_name: str,
        writers: Iterable[str] = (),
        *,
        trusts_ids: bool = False,
        ids: MultiWriterIdGenerator | None = None,
        plausible_distance: int = PLAUSIBLE_DISTANCE,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self.original = stream
        self._seconds = seconds
        # The position of this process that was read last, the result of get_mark() just
        # before, and when to read the position again even if that result is the same.
        self._own_token = 0
        self._own_mark: tuple[int | None, ...] | None = None
        self._own_due = 0.0
        self.is_limited = False
        self._plausible_distance = plausible_distance
        self.ids = ids
        # The sequence's last value when it was last read.
        self._allocated = 0
        self._instance_name = instance_name
        self._writers = tuple(writers)
        name = stream.NAME
        known = STANDARD_STREAMS.get(name)
        held_in_memory = known is not None and known.held_in_memory
        self.description = StreamDescription(
            name,
            HostRowCodec(name, stream.parse_row),
            idempotent=known is not None and known.idempotent,
            # Ids of streams in the database never start over.
            resettable=held_in_memory,
            held_in_memory=held_in_memory,
            announce_own_moves_only=(
                known is not None and known.announce_own_moves_only
            ),
        )
        self._knows_local_updates = trusts_ids and not held_in_memory
        # The host itself resets the tokens of streams held in memory. The exception is
        # the stream "federation", whose position only its writer knows.
        self._received: dict[str, int] | None = None
        if not held_in_memory or name == "federation":
            self._baseline = stream.current_token(_UNKNOWN_WRITER)
            self._received = {
                writer: stream.current_token(writer)
                for writer in self._writers
                if writer != instance_name
            }

    def current_token(self, instance_name: str) -> int:
        """Return the token up to which this process has a writer's rows."""
        if self._received is None or instance_name == self._instance_name:
            return self.original.current_token(instance_name)
        return self._received.get(instance_name, self._baseline)

    def advance(self, instance_name: str, token: int, *, is_position: bool) -> None:
        """Record that the rows of a writer up to ``token`` were delivered.

        :param is_position: whether the writer announced the token as its position. A
            position may be lower than the recorded one, because the writer restarted
            or the recorded one was false.
        """
        received = self._received
        if received is None:
            return
        if is_position or token > received.get(instance_name, self._baseline):
            received[instance_name] = token

    def writers_behind(self, instance_name: str, token: int) -> list[str]:
        """Return the writers whose rows up to another writer's position may be missing.

        The host treats an announced token as finished, even if another instance wrote
        the row with that token. It may then advance the token up to which it shows rows
        to its users. This process might not have received all rows of the returned
        writers at or below that token.

        :param instance_name: the writer that announced ``token``.
        """
        received = self._received
        if not received or token <= self.original.current_token(_UNKNOWN_WRITER):
            return []
        return [
            writer
            for writer in self._writers
            if writer != instance_name
            and writer != self._instance_name
            and received[writer] < token
        ]

    def is_known_to_host(self, instance_name: str, token: int) -> bool:
        """Return whether a writer's position would change nothing for the host.

        If so, the host's token of the writer is already at or above the position, for
        instance because of rows of other writers. Streams held in memory can be reset
        by any position, so for these the answer is ``False``.
        """
        return not self.description.held_in_memory and token <= int(
            self.original.current_token(instance_name)
        )

    def minimal_local_current_token(self) -> int:
        """Return the position that this process, as a writer, may announce.

        If this package's generator supplies the ids, the position is never beyond the
        sequence, even if other writers announced greater positions. The position is
        reused for a limited time while ``get_mark()`` of the ids returns the same
        value: the host notifies of a write without the name of its stream, and the
        streamer then reads the positions of all streams.
        """
        ids = self.ids
        if ids is None:
            return self.original.current_token(self._instance_name)
        # Read the mark before the position, so that no later change is missed.
        mark, now = ids.get_mark(), self._seconds()
        if mark != self._own_mark or now >= self._own_due:
            follows_others = not self.description.announce_own_moves_only
            announceable = ids.get_announceable_token(follows_others=follows_others)
            token = self.original.current_token(self._instance_name)
            self._own_token = min(token, abs(announceable))
            self.is_limited = follows_others and self._own_token < token
            reused_for = REUSE_SECONDS if self.is_limited else KEEP_SECONDS
            self._own_due, self._own_mark = now + reused_for, mark
        return self._own_token

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether this process may have written rows after ``from_token``.

        The answer of the host's own generator is not always correct. Therefore return
        ``True`` unless this package's generator supplies the ids.
        """
        if not self._knows_local_updates:
            return True
        return self.original.minimal_local_current_token() > from_token

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Fetch one page of a writer's rows in ``(from_token, upto_token]``.

        If ``upto_token`` is implausibly great, the sequence is read first. If the token
        exceeds the sequence's last value by more than the plausible distance, rows are
        fetched only up to that value.
        """
        last_token = None
        if self.ids is not None and not self.is_plausible(instance_name, upto_token):
            last = await self.ids.get_max_allocated_token()
            self._allocated = max(self._allocated, last)
            if upto_token > last + self._plausible_distance:
                upto_token = last_token = last
                if upto_token <= from_token:
                    return StreamUpdateResult([], upto_token, False, last_token)
        updates, upto, limited = await self.original.get_updates_since(
            instance_name, from_token, upto_token
        )
        if self.description.held_in_memory and not limited and upto < upto_token:
            # The response shows that the writer itself is only at this position.
            last_token = upto
        return StreamUpdateResult(updates, upto, limited, last_token)

    def is_plausible(self, instance_name: str, token: int) -> bool:
        """Return whether a token is plausible, without reading the sequence."""
        if instance_name == self._instance_name:
            return True
        if self.description.held_in_memory:
            return token <= self.current_token(instance_name) + self._plausible_distance
        return self.ids is None or token <= self._allocated + self._plausible_distance


def find_generator(
    instance_name: str, stream_name: str
) -> MultiWriterIdGenerator | None:
    """Return the generator of a stream's ids, if it belongs to this package."""
    known = STANDARD_STREAMS.get(stream_name)
    if known is None or known.sequence is None:
        return None
    return generators.get((instance_name, known.sequence))


def ids_are_ours() -> bool:
    """Return whether the host uses this package's id generator."""
    module = importlib.import_module("synapse.storage.util.id_generators")
    return issubclass(module.MultiWriterIdGenerator, MultiWriterIdGenerator)


class HostStreams:
    """The host's streams, and those of them that this process writes."""

    def __init__(self, hs: Homeserver) -> None:
        classes = importlib.import_module("synapse.replication.tcp.streams").STREAMS_MAP
        instance_name = hs.get_instance_name()
        trusts_ids = ids_are_ours()
        distance = own_settings().receiving.plausible_distance
        self._streams = {
            name: HostStream(
                cls(hs),
                instance_name,
                declared_writers(hs.config.worker, name),
                trusts_ids=trusts_ids,
                ids=find_generator(instance_name, name),
                plausible_distance=distance,
                seconds=hs.get_reactor().seconds,
            )
            for name, cls in classes.items()
        }
        self._written = [
            stream
            for name, stream in self._streams.items()
            if writes(hs.config.worker, instance_name, name)
        ]

    def get_streams(self) -> Mapping[str, HostStream]:
        """Return every stream, by its name on the wire."""
        return self._streams

    def get_streams_to_replicate(self) -> Sequence[HostStream]:
        """Return the streams that this process writes."""
        return self._written

    def get_generators(self) -> Mapping[str, MultiWriterIdGenerator]:
        """Return this package's id generators, by the name of their stream."""
        return {
            name: stream.ids
            for name, stream in self._streams.items()
            if stream.ids is not None
        }


def writes(worker_config: WorkerSettings, instance_name: str, stream_name: str) -> bool:
    """Return whether a process writes a stream.

    :param worker_config: the host's configuration of workers.
    """
    known = STANDARD_STREAMS.get(stream_name)
    if known is not None and known.any_instance_writes:
        return True
    if stream_name == "federation" and worker_config.send_federation:
        # A process that sends to other servers itself does not write the stream.
        return False
    return instance_name in declared_writers(worker_config, stream_name)


def declared_writers(worker_config: WorkerSettings, stream_name: str) -> Sequence[str]:
    """Return the configured writers of a stream; none if every instance may write it.

    :param worker_config: the host's configuration of workers.
    """
    known = STANDARD_STREAMS.get(stream_name)
    if known is not None and known.any_instance_writes:
        return ()
    key = (known.writers_key if known is not None else stream_name) or ""
    writers: Sequence[str] = getattr(worker_config.writers, key, (MAIN_INSTANCE,))
    return writers


def instances_of(instance_map: Mapping[str, object]) -> dict[str, object]:
    """Return a host's ``instance_map`` with the names of instances as its keys."""
    return {
        MAIN_INSTANCE if key == _MAIN_IN_MAP else key: location
        for key, location in instance_map.items()
    }
