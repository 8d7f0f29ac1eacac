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
from synapse_replication.streams.registry import MAIN_INSTANCE, STANDARD_STREAMS
from synapse_replication.streams.rows import DecodedRows, RowCodec, decode_json
from synapse_replication.streams.stream import StreamDescription, StreamUpdateResult

__all__ = ["HostRowCodec", "HostStream", "HostStreams"]


class HostRowCodec(RowCodec[Any]):
    """Between JSON text and the host's own row classes."""

    def __init__(self, stream_name: str, parse_row: Callable[[Any], Any]) -> None:
        self.stream_name = stream_name
        self._parse_row = parse_row

    def decode(self, texts: Sequence[bytes]) -> DecodedRows[Any]:
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

    def __init__(self, stream: Any) -> None:
        self.original = stream
        name: str = stream.NAME
        codec = HostRowCodec(name, stream.parse_row)
        known = STANDARD_STREAMS.get(name)
        self.description = (
            StreamDescription(name, codec)
            if known is None
            else StreamDescription(
                name,
                codec,
                idempotent=known.description.idempotent,
                resettable=known.description.resettable,
                held_in_memory=known.description.held_in_memory,
                announce_own_moves_only=known.description.announce_own_moves_only,
            )
        )

    def current_token(self, instance_name: str) -> int:
        """Tell how far this process has got with a writer's rows."""
        return int(self.original.current_token(instance_name))

    def minimal_local_current_token(self) -> int:
        """Tell what this process, as a writer, may announce."""
        return int(self.original.minimal_local_current_token())

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Guess: the host's streams make no such promise."""
        return True

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Fetch a writer's rows in ``(from_token, upto_token]``, one page."""
        updates, upto, limited = await self.original.get_updates_since(
            instance_name, from_token, upto_token
        )
        return StreamUpdateResult(updates, upto, limited)


class HostStreams:
    """All of the host's streams, and those that this process writes."""

    def __init__(self, hs: Any) -> None:
        classes = importlib.import_module("synapse.replication.tcp.streams").STREAMS_MAP
        self._streams = {name: HostStream(cls(hs)) for name, cls in classes.items()}
        instance_name = hs.get_instance_name()
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
