"""The host's streams: its own ``Stream`` objects, as the handlers want them.

Theory of operation: the host's classes know their tables, their caches and their
rows; they are asked for tokens, pages and parsed rows. What they do not say, the
rules of each stream and who writes it, comes from the registry of standard streams.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from synapse_replication.errors import RowDecodeError
from synapse_replication.storage.id_generators import MultiWriterIdGenerator
from synapse_replication.streams.rows import DecodedRows, RowCodec, decode_json
from synapse_replication.streams.standard.registry import (
    MAIN_INSTANCE,
    STANDARD_STREAMS,
)
from synapse_replication.streams.stream import StreamDescription, StreamUpdateResult

__all__ = ["HostRowCodec", "HostStream", "HostStreams"]


class HostRowCodec(RowCodec[Any]):
    """Between JSON text and the host's own row classes."""

    def __init__(self, stream_name: str, parse_row: Callable[[Any], Any]) -> None:
        self.stream_name = stream_name
        self._parse_row = parse_row

    def decode(self, texts: Sequence[bytes | str]) -> DecodedRows[Any]:
        """Decode rows that came together.

        :raises RowDecodeError: one of them is no row of this stream.
        """
        rows = []
        for index, text in enumerate(texts):
            try:
                rows.append(self._parse_row(decode_json(text)))
            except Exception as error:
                # What the host's own class says of a wrong row is its own affair.
                raise RowDecodeError(self.stream_name, index, repr(error)) from error
        return DecodedRows(rows)

    def from_json(self, value: Any) -> Any:
        """Make a row of a JSON value.

        :raises RowDecodeError: it is no row of this stream.
        """
        try:
            return self._parse_row(value)
        except Exception as error:
            raise RowDecodeError(self.stream_name, 0, repr(error)) from error

    def to_json(self, row: Any) -> Any:
        """Give the value itself: the host gives rows to send as JSON values."""
        return row


class HostStream:
    """One of the host's streams, as a :class:`Stream`.

    :ivar original: the host's own object.
    """

    def __init__(self, stream: Any, instance_name: str) -> None:
        self.original = stream
        self._instance_name = instance_name
        name: str = stream.NAME
        known = STANDARD_STREAMS.get(name)
        held_in_memory = known is not None and known.description.held_in_memory
        self.description = StreamDescription(
            name,
            HostRowCodec(name, stream.parse_row),
            idempotent=known is not None and known.description.idempotent,
            # Whatever is in the database is not begun again.
            resettable=held_in_memory,
            held_in_memory=held_in_memory,
            announce_own_moves_only=(
                known is not None and known.description.announce_own_moves_only
            ),
        )
        self._tells_local_updates = not held_in_memory and ids_are_ours()
        self._heard_of: dict[str, int] | None = None
        if (known is not None and known.anybody_writes) or name == "federation":
            self._heard_of = {}

    def current_token(self, instance_name: str) -> int:
        """Tell how far this process has got with a writer's rows."""
        if self._heard_of is None or instance_name == self._instance_name:
            return int(self.original.current_token(instance_name))
        # Of a writer that is not declared the host only knows up to where all
        # writers together are, which our own writing moves past what we lack. Of
        # what is for another server it knows nothing, except in its writer.
        token = self._heard_of.get(instance_name)
        if token is None:
            token = int(self.original.current_token(instance_name))
            self._heard_of[instance_name] = token
        return token

    def heard_of(self, instance_name: str, token: int, *, is_position: bool) -> None:
        """Take note that a writer's rows up to ``token`` were handled.

        :param is_position: the writer said so itself, and may have begun again.
        """
        known = self._heard_of
        if known is not None and (
            token > known.get(instance_name, 0)
            or (is_position and self.description.resettable)
        ):
            known[instance_name] = token

    def minimal_local_current_token(self) -> int:
        """Tell what this process, as a writer, may announce."""
        return int(self.original.current_token(self._instance_name))

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Tell whether we may have written rows after ``from_token``.

        What the host's own ids say of it is not always so (C11); ours keep it.
        """
        if not self._tells_local_updates:
            return True
        return int(self.original.minimal_local_current_token()) > from_token

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Fetch a writer's rows in ``(from_token, upto_token]``, one page."""
        updates, upto, limited = await self.original.get_updates_since(
            instance_name, from_token, upto_token
        )
        return StreamUpdateResult(updates, upto, limited)


def ids_are_ours() -> bool:
    """Tell whether the host's ids come from our generator."""
    module = importlib.import_module("synapse.storage.util.id_generators")
    return issubclass(module.MultiWriterIdGenerator, MultiWriterIdGenerator)


class HostStreams:
    """All of the host's streams, and those that this process writes."""

    def __init__(self, hs: Any) -> None:
        classes = importlib.import_module("synapse.replication.tcp.streams").STREAMS_MAP
        instance_name = hs.get_instance_name()
        self._streams = {
            name: HostStream(cls(hs), instance_name) for name, cls in classes.items()
        }
        self._written = [
            stream
            for name, stream in self._streams.items()
            if writes(hs.config.worker, instance_name, name)
        ]

    def get_streams(self) -> Mapping[str, HostStream]:
        """Give every stream, by its name on the wire."""
        return self._streams

    def get_streams_to_replicate(self) -> Sequence[HostStream]:
        """Give those that this process writes."""
        return self._written


def writes(worker_config: Any, instance_name: str, stream_name: str) -> bool:
    """Tell whether a process writes a stream.

    :param worker_config: the host's configuration of workers.
    """
    known = STANDARD_STREAMS.get(stream_name)
    if known is not None and known.anybody_writes:
        return True
    if stream_name == "federation" and worker_config.send_federation:
        # Who sends to other servers itself has nothing to pass on.
        return False
    key = (known.writers_key if known is not None else stream_name) or ""
    return instance_name in getattr(worker_config.writers, key, (MAIN_INSTANCE,))
