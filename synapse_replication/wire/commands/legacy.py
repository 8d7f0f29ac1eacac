"""Commands that only older peers send."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import msgspec
from typing_extensions import override

from synapse_replication.wire.commands.base import Command, decode_fields

_CACHE_KEYS = msgspec.json.Decoder(list[Any] | None)


@attrs.frozen
class RemovePusherCommand(Command):
    """Request to remove a pusher; only older peers send it.

    :ivar app_id: contains no spaces.
    :ivar push_key: may contain spaces.
    :ivar user_id: contains no spaces.
    """

    NAME: ClassVar[str] = "REMOVE_PUSHER"
    app_id: str
    push_key: str
    user_id: str

    @classmethod
    @override
    def from_line(cls, line: str) -> RemovePusherCommand:
        app_id, rest = cls._words(line, 2)
        push_key, space, user_id = rest.rpartition(" ")
        if not space:
            cls._raise_unparsable("it has 2 fields, not 3")
        return cls(app_id, push_key, user_id)

    @override
    def to_line(self) -> str:
        return f"{self.app_id} {self.push_key} {self.user_id}"


@attrs.frozen
class InvalidateCacheCommand(Command):
    """Notice that an entry of a cache, or the whole cache, is stale.

    Only older peers send it.

    :ivar cache_func: the name of the cached function.
    :ivar keys: the entry's key, as JSON values; ``None`` for the whole cache.
    """

    NAME: ClassVar[str] = "INVALIDATE_CACHE"
    cache_func: str
    keys: list[Any] | None

    @classmethod
    @override
    def from_line(cls, line: str) -> InvalidateCacheCommand:
        cache_func, text = cls._words(line, 2)
        return cls(cache_func, decode_fields(cls, _CACHE_KEYS, text))

    @override
    def to_line(self) -> str:
        return f"{self.cache_func} {self._json(self.keys)}"
