"""Tokens of streams with many writers, and positions of rows: different types.

A :class:`MultiWriterStreamToken` cuts a stream in two: it is a vector clock, one
position for each writer. A :class:`PersistedPosition` is where one row is. What
may be asked: whether a row is before or after a token, which rows are between two
tokens, the maximum and the minimum of two tokens. Tokens are ordered only in
part, and a row's position is no token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from synapse_replication.errors import TokenError

__all__ = [
    "MultiWriterStreamToken",
    "PersistedPosition",
    "SqlBounds",
    "is_stream_position_in_range",
    "rows_between",
]

_MAX_ID = 2**63 - 1
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


@attrs.frozen
class PersistedPosition:
    """Where a row is: who wrote it, and its id.

    :ivar instance_name: the writer.
    :ivar stream: the id, as a distance from zero.
    """

    instance_name: str
    stream: int

    def persisted_after(self, token: MultiWriterStreamToken) -> bool:
        """Return whether the row comes after a token: it is not covered by it."""
        return token.get_stream_pos_for_instance(self.instance_name) < self.stream


def _freeze(instance_map: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(instance_map))


@attrs.frozen
class MultiWriterStreamToken:
    """Up to where each writer's rows are covered.

    Entries at or below the minimum say nothing and are left out, so that equal
    tokens are equal objects.

    :ivar stream: the minimum: every writer that is not in ``instance_map`` is here.
    :ivar instance_map: those that are further.
    """

    stream: int
    instance_map: Mapping[str, int] = attrs.field(
        factory=dict, converter=_freeze, hash=False
    )

    def __attrs_post_init__(self) -> None:
        further = {w: p for w, p in self.instance_map.items() if p > self.stream}
        object.__setattr__(self, "instance_map", MappingProxyType(further))

    def __reduce__(self) -> tuple[type, tuple[int, dict[str, int]]]:
        return type(self), (self.stream, dict(self.instance_map))

    # -- text --------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str, name_of: Callable[[int], str]) -> MultiWriterStreamToken:
        """Read the text form.

        Entries below the minimum are left out; a writer that is named twice is
        where it is furthest.

        :param name_of: from the number of an instance to its name; raises
            :exc:`LookupError` for one that is not known.
        :raises TokenError: if it is no token.
        """
        if not text.startswith("m"):
            return cls(_to_id(text, text))
        minimum, *entries = text[1:].split("~")
        positions: dict[str, int] = {}
        for entry in entries:
            # A trailing separator is harmless, and was written once.
            if not entry:
                continue
            number, dot, position = entry.partition(".")
            if not dot:
                raise TokenError(text, "an entry is written <instance>.<position>")
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
        """Write the text form: ``m<min>~<instance>.<position>...`` or a number.

        :param id_of: from the name of an instance to its number.
        """
        if not self.instance_map:
            return str(self.stream)
        entries = sorted((id_of(w), p) for w, p in self.instance_map.items())
        return "~".join([f"m{self.stream}", *(f"{i}.{p}" for i, p in entries)])

    # -- positions ---------------------------------------------------------------------

    @classmethod
    def from_positions(
        cls, persisted_upto: int, positions: Mapping[str, int]
    ) -> MultiWriterStreamToken:
        """Make a token of what an id generator says (distances from zero)."""
        return cls(persisted_upto, positions)

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
        """Return whether everything that this covers is covered by ``other``.

        Of two tokens neither may be.
        """
        return self.stream <= other.stream and all(
            position <= other.get_stream_pos_for_instance(writer)
            for writer, position in self.instance_map.items()
        )

    def copy_and_advance(self, other: MultiWriterStreamToken) -> MultiWriterStreamToken:
        """Return the maximum: the least token that covers what either covers."""
        return self._combine(other, max)

    def copy_and_retreat(self, other: MultiWriterStreamToken) -> MultiWriterStreamToken:
        """Return the minimum: the greatest token that covers what both cover."""
        return self._combine(other, min)

    def _combine(
        self, other: MultiWriterStreamToken, choose: Callable[[int, int], int]
    ) -> MultiWriterStreamToken:
        return MultiWriterStreamToken(
            choose(self.stream, other.stream),
            {
                writer: choose(
                    self.get_stream_pos_for_instance(writer),
                    other.get_stream_pos_for_instance(writer),
                )
                for writer in {*self.instance_map, *other.instance_map}
            },
        )

    def bound_stream_token(self, max_stream: int) -> MultiWriterStreamToken:
        """Return a token that covers what this covers up to ``max_stream``."""
        return MultiWriterStreamToken(
            min(self.stream, max_stream),
            {w: min(p, max_stream) for w, p in self.instance_map.items()},
        )

    def after_partial_read(
        self, upper: MultiWriterStreamToken, read_upto: int
    ) -> MultiWriterStreamToken:
        """Return the token after some of the rows between this and ``upper``.

        :param upper: at or after this.
        :param read_upto: all rows between the two whose id is at or below it were
            read, of every writer.
        """
        return self.copy_and_advance(upper.bound_stream_token(read_upto))


def _to_id(text: str, number: str) -> int:
    if not _NUMBER.fullmatch(number) or int(number) > _MAX_ID:
        raise TokenError(text, "a position is a number of up to 63 bits")
    return int(number)


def is_stream_position_in_range(
    low: MultiWriterStreamToken | None,
    high: MultiWriterStreamToken | None,
    instance_name: str | None,
    position: int,
) -> bool:
    """Return whether a row is after ``low`` and not after ``high``.

    :param low: ``None`` for no lower bound, ``high`` likewise.
    :param instance_name: the row's writer, if known.
    :param position: the row's id, as a distance from zero.
    """
    if low and position <= low.get_stream_pos_for_instance(instance_name):
        return False
    return not (high and position > high.get_stream_pos_for_instance(instance_name))


@attrs.frozen
class SqlBounds:
    """A condition for a WHERE clause.

    :ivar sql: with ``%s`` for each parameter.
    :ivar parameters: in order.
    """

    sql: str
    parameters: tuple[int | str, ...]


def rows_between(
    low: MultiWriterStreamToken,
    high: MultiWriterStreamToken,
    *,
    id_column: str,
    writer_column: str,
) -> SqlBounds:
    """Write the condition for exactly the rows after ``low`` and not after ``high``.

    It begins with plain bounds of the id, for an index. Columns are put in as they
    are: they must come from a declaration, never from a request. Ids are positive.
    """
    parameters: list[int | str] = [low.stream, high.get_max_stream_pos()]
    conditions = [f"{id_column} > %s", f"{id_column} <= %s"]
    for token, operator in ((low, ">"), (high, "<=")):
        if not token.instance_map:
            continue
        cases = " ".join("WHEN %s THEN %s" for _ in token.instance_map)
        for writer, position in sorted(token.instance_map.items()):
            parameters += [writer, position]
        parameters.append(token.stream)
        conditions.append(
            f"{id_column} {operator} CASE {writer_column} {cases} ELSE %s END"
        )
    return SqlBounds(" AND ".join(conditions), tuple(parameters))
