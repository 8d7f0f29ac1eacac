"""Tokens of streams with many writers, and positions of rows.

A :class:`MultiWriterStreamToken` divides a stream in two: it is a vector clock with one
position per writer. A :class:`PersistedPosition` is the position of one row. The two
are separate types because they are compared differently: a row is either covered by a
token or after it, whereas of two tokens, each may cover rows that the other does not.

See docs/failure-modes.rst: failure-entry-below-minimum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from synapse_replication.errors import TokenError

#: The bounds of a token, which is a signed 64-bit integer everywhere.
MIN_TOKEN = -(2**63)
MAX_TOKEN = 2**63 - 1
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


@attrs.frozen
class PersistedPosition:
    """The position of a row: its writer and its id.

    :ivar instance_name: the writer.
    :ivar stream: the absolute value of the id, which is negative in some streams.
    """

    instance_name: str
    stream: int

    def persisted_after(self, token: MultiWriterStreamToken) -> bool:
        """Return whether the row is after a token, that is, not covered by it."""
        return token.get_stream_pos_for_instance(self.instance_name) < self.stream


@attrs.frozen
class MultiWriterStreamToken:
    """A vector clock: the position up to which each writer's rows are covered.

    Entries at or below the minimum are redundant and removed, so that tokens with the
    same meaning compare equal.

    :ivar stream: the minimum: the position of every writer that is not in
        ``instance_map``.
    :ivar instance_map: the positions of writers beyond the minimum.
    """

    stream: int
    instance_map: Mapping[str, int] = attrs.field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        further = {w: p for w, p in self.instance_map.items() if p > self.stream}
        object.__setattr__(self, "instance_map", MappingProxyType(further))

    def __reduce__(self) -> tuple[type, tuple[int, dict[str, int]]]:
        return type(self), (self.stream, dict(self.instance_map))

    # -- text --------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str, name_of: Callable[[int], str]) -> MultiWriterStreamToken:
        """Parse the text form.

        Entries at or below the minimum are removed. If a writer occurs twice, its
        greater position counts.

        :param name_of: returns the name of an instance by its number; raises
            :exc:`LookupError` if the number is not known.
        :raises TokenError: if the text is not a token, or the number of an instance is
            not known.
        """
        if not text.startswith("m"):
            return cls(_to_id(text, text))
        minimum, *entries = text[1:].split("~")
        positions: dict[str, int] = {}
        for entry in entries:
            # Older versions of Synapse wrote a trailing separator.
            if not entry:
                continue
            number, dot, position = entry.partition(".")
            if not dot:
                raise TokenError(text, "an entry must be <instance>.<position>")
            instance_id = _to_id(text, number)
            try:
                writer = name_of(instance_id)
            except LookupError:
                raise TokenError(
                    text, f"no instance has the number {instance_id}"
                ) from None
            positions[writer] = max(positions.get(writer, 0), _to_id(text, position))
        return cls(_to_id(text, minimum), positions)

    def to_string(self, id_of: Callable[[str], int]) -> str:
        """Return the text form: ``m<min>~<instance>.<position>...``.

        If no writer is beyond the minimum, the text form is the minimum alone.

        :param id_of: returns the number of an instance by its name.
        """
        if not self.instance_map:
            return str(self.stream)
        entries = sorted((id_of(w), p) for w, p in self.instance_map.items())
        return "~".join([f"m{self.stream}", *(f"{i}.{p}" for i, p in entries)])

    # -- positions ---------------------------------------------------------------------

    def get_stream_pos_for_instance(self, instance_name: str | None) -> int:
        """Return a writer's position; that of an unknown writer is the minimum."""
        if instance_name is None:
            return self.stream
        return self.instance_map.get(instance_name, self.stream)

    def get_max_stream_pos(self) -> int:
        """Return the greatest position of any writer."""
        return max(self.instance_map.values(), default=self.stream)

    # -- order -------------------------------------------------------------------------

    def is_before_or_eq(self, other: MultiWriterStreamToken) -> bool:
        """Return whether ``other`` covers every row that this token covers.

        The order is partial: there are tokens of which neither covers the other.
        """
        return self.stream <= other.stream and all(
            position <= other.get_stream_pos_for_instance(writer)
            for writer, position in self.instance_map.items()
        )

    def copy_and_advance(self, other: MultiWriterStreamToken) -> MultiWriterStreamToken:
        """Return the maximum: the least token that covers all rows of either."""
        return MultiWriterStreamToken(
            max(self.stream, other.stream),
            {
                writer: max(
                    self.get_stream_pos_for_instance(writer),
                    other.get_stream_pos_for_instance(writer),
                )
                for writer in {*self.instance_map, *other.instance_map}
            },
        )

    def bound_stream_token(self, max_stream: int) -> MultiWriterStreamToken:
        """Return a token that covers this token's rows up to ``max_stream``."""
        return MultiWriterStreamToken(
            min(self.stream, max_stream),
            {w: min(p, max_stream) for w, p in self.instance_map.items()},
        )

    def after_partial_read(
        self, upper: MultiWriterStreamToken, read_upto: int
    ) -> MultiWriterStreamToken:
        """Return the token after a partial read of the rows from this token to another.

        :param upper: the token, at or after this one, up to which rows are read.
        :param read_upto: the id up to which the rows of every writer were read.
        """
        return self.copy_and_advance(upper.bound_stream_token(read_upto))


def _to_id(text: str, number: str) -> int:
    if not _NUMBER.fullmatch(number) or int(number) > MAX_TOKEN:
        raise TokenError(
            text, "each number must be a decimal integer of at most 63 bits"
        )
    return int(number)
