"""RDATA lines in bulk: parses them into groups of rows, and encodes rows as lines.

Theory of operation: nearly every line of a busy link is RDATA, so these lines are not
parsed into commands one by one. :func:`read_lines` receives the lines that arrived
together and collects the RDATA lines of a stream in groups, which are parallel lists of
tokens and rows: an :class:`RdataGroup` if all rows are from one writer, an
:class:`InterleavedGroup`, with a list of the writers, if they are from several. Rows
remain JSON text, which is the most compact form for a queue; the consumer of the queue
decodes them with the row type of their stream. Other lines become commands. An invalid
line, whether RDATA or not, becomes a :class:`RefusedLine`. Empty lines are skipped.

All rows of a stream remain in order, whichever writer they are from. Every command
other than RDATA remains in order with all rows before and after it. Rows of different
streams between two such commands may be regrouped.

See docs/failure-modes.rst: failure-interleaved-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress, groupby
from typing import TypeAlias

from msgspec import Struct, field

from synapse_replication.errors import RemoteProtocolError, UnparsableLineError
from synapse_replication.wire import commands

_BATCH = commands.BATCH.encode()
#: The most bytes of a too long line that are parsed.
_MAX_HEAD = 1024
_SAFE_DIGITS = commands.SAFE_DIGITS


class RdataGroup(Struct):
    """Rows of one writer of one stream that arrived together.

    :ivar tokens: the token of each row; ``None`` for all but the last row of a batch.
        A batch may continue in a later group of the same writer.
    :ivar rows: the JSON text of each row, not validated yet. The list is as long as
        ``tokens``.
    """

    stream_name: str
    instance_name: str
    tokens: list[int | None] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)


class InterleavedGroup(Struct):
    """Rows of several writers of one stream that arrived together.

    :ivar instance_names: the writer of each row. The list is as long as ``tokens``.
    :ivar tokens: see :class:`RdataGroup`.
    :ivar rows: see :class:`RdataGroup`.
    """

    stream_name: str
    instance_names: list[str]
    tokens: list[int | None]
    rows: list[bytes]

    def part(self, start: int, end: int) -> InterleavedGroup:
        """Return a group of ``rows[start:end]``."""
        return InterleavedGroup(
            self.stream_name,
            self.instance_names[start:end],
            self.tokens[start:end],
            self.rows[start:end],
        )

    def without(self, instance_name: str) -> InterleavedGroup:
        """Return a group without the rows of one writer. It may be empty."""
        is_other = [name != instance_name for name in self.instance_names]
        return InterleavedGroup(
            self.stream_name,
            list(compress(self.instance_names, is_other)),
            list(compress(self.tokens, is_other)),
            list(compress(self.rows, is_other)),
        )

    def groups(self) -> Iterator[RdataGroup]:
        """Split into groups of consecutive rows of one writer, in order."""
        start = 0
        for instance_name, of_writer in groupby(self.instance_names):
            end = start + sum(1 for _ in of_writer)
            yield RdataGroup(
                self.stream_name,
                instance_name,
                self.tokens[start:end],
                self.rows[start:end],
            )
            start = end


class RefusedLine(Struct, frozen=True):
    """A line that is not a valid command.

    :ivar error: the reason why it is not valid.
    :ivar stream_name: the stream of the row that was lost with the line; ``None`` if it
        is unknown or the line is not RDATA.
    :ivar instance_name: the row's writer; ``None`` if ``stream_name`` is ``None``.
    """

    error: RemoteProtocolError
    stream_name: str | None = None
    instance_name: str | None = None


ReceivedItem: TypeAlias = RdataGroup | InterleavedGroup | commands.Command | RefusedLine


def read_lines(lines: Sequence[bytes]) -> list[ReceivedItem]:
    """Parse lines that arrived together.

    All groups end at each command other than RDATA, and at each invalid line. Empty
    lines are skipped. Never raises: for an invalid line, a :class:`RefusedLine` is
    returned.

    :param lines: in the order of arrival, without their ends.
    """
    # This function is long, because calling functions for each received line would slow
    # down the hot path.
    items: list[ReceivedItem] = []
    # For each stream, the group to which rows can still be added.
    open_groups: dict[bytes, _OpenGroup] = {}
    names: dict[bytes, str] = {}
    # The open group of the last row's stream, unpacked; see _OpenGroup.
    last_stream: bytes | None = None
    first_writer = b""
    writers: list[str] | None = None
    tokens: list[int | None] = []
    rows: list[bytes] = []
    for line in lines:
        words = line.split(b" ", 4)
        if len(words) == 5 and words[0] == b"RDATA":
            _, stream, writer, text, row = words
            try:
                token = (
                    int(text)
                    if text.isdigit() and len(text) <= _SAFE_DIGITS
                    else _read_token(text)
                )
                if stream != last_stream:
                    known = open_groups.get(stream)
                    if known is None:
                        known = _begin_group(stream, writer, items)
                        open_groups[stream] = known
                    first_writer, writers, tokens, rows, _ = known
                    last_stream = stream
                if writers is not None:
                    name = names.get(writer)
                    if name is None:
                        name = names[writer] = _read_name(writer)
                    writers.append(name)
                elif writer != first_writer:
                    names[writer] = _read_name(writer)
                    open_groups[stream] = _interleave(open_groups[stream], items)
                    writers = open_groups[stream][1]
                    assert writers is not None
                    writers.append(names[writer])
            except ValueError as error:
                items.append(
                    _read_older_row(line)
                    or _refused_line(words, UnparsableLineError("RDATA", str(error)))
                )
            else:
                tokens.append(token)
                rows.append(row)
                continue
        elif line:
            older = _read_older_row(line) if words[0] == b"RDATA" else None
            items.append(older or _read_other_line(line, words))
        else:
            continue
        open_groups.clear()
        last_stream = None
    return items


#: The first writer's name as bytes; the writer of each row, or ``None`` if one writer
#: wrote all of them; the tokens; the rows; and the group's index among the items.
_OpenGroup: TypeAlias = tuple[
    bytes, list[str] | None, list[int | None], list[bytes], int
]


def _begin_group(stream: bytes, writer: bytes, items: list[ReceivedItem]) -> _OpenGroup:
    group = RdataGroup(_read_name(stream), _read_name(writer))
    items.append(group)
    return writer, None, group.tokens, group.rows, len(items) - 1


def _interleave(known: _OpenGroup, items: list[ReceivedItem]) -> _OpenGroup:
    """Replace a group of one writer with a group of several writers."""
    first_writer, _, tokens, rows, index = known
    group = items[index]
    assert isinstance(group, RdataGroup)
    writers = [group.instance_name] * len(tokens)
    items[index] = InterleavedGroup(group.stream_name, writers, tokens, rows)
    return first_writer, writers, tokens, rows, index


@lru_cache(maxsize=1024)
def _read_name(name: bytes) -> str:
    """Decode and validate a name; valid names are cached."""
    return commands.parse_name(name.decode())


def _read_token(text: bytes) -> int | None:
    return None if text == _BATCH else commands.parse_token(text.decode())


def _read_older_row(line: bytes) -> RdataGroup | None:
    """Return the row of an RDATA line without the writer, as older peers send it."""
    try:
        fields = commands.older_row(line.decode().partition(" ")[2])
        if fields is None:
            return None
        stream_name, instance_name, token, row = fields
        tokens = [_read_token(token.encode())]
        return RdataGroup(
            commands.parse_name(stream_name), instance_name, tokens, [row.encode()]
        )
    except ValueError:
        return None


def _read_other_line(line: bytes, words: list[bytes]) -> commands.Command | RefusedLine:
    try:
        return commands.parse_command_from_line(line.decode())
    except UnicodeDecodeError:
        name = words[0].decode("utf-8", "replace")
        error: RemoteProtocolError = UnparsableLineError(name, "it is not UTF-8")
    except RemoteProtocolError as raised:
        # Drop the traceback, whose frames refer to the line, which may be long.
        error = raised.with_traceback(None)
        error.__context__ = None
    return _refused_line(words, error)


def _refused_line(words: list[bytes], error: RemoteProtocolError) -> RefusedLine:
    if words[0] != b"RDATA" or len(words) < 3:
        return RefusedLine(error)
    try:
        return RefusedLine(error, _read_name(words[1]), _read_name(words[2]))
    except ValueError:
        # The name of the stream or the writer is invalid, so no position depends on the
        # row.
        return RefusedLine(error)


def refuse_long_line(line: bytes, limit: int) -> RefusedLine:
    """Refuse a line because of its length, without parsing more than its names.

    :param limit: the longest permitted line, in bytes.
    """
    words = line[:_MAX_HEAD].split(b" ", 4)
    name = words[0].decode("utf-8", "replace")
    reason = f"it has more than {limit} bytes"
    return _refused_line(words, UnparsableLineError(name, reason))


def rdata_lines(
    stream_name: str,
    instance_name: str,
    batches: Iterable[tuple[int, Sequence[bytes]]],
) -> list[bytes]:
    """Return RDATA lines, without their ends.

    :param batches: pairs of a token and the JSON texts of its rows, at least one row
        per token.
    """
    head = f"RDATA {stream_name} {instance_name} ".encode()
    batch_head = head + _BATCH + b" "
    lines: list[bytes] = []
    for token, rows in batches:
        if len(rows) > 1:
            lines += [batch_head + row for row in rows[:-1]]
        lines.append(b"%b%d %b" % (head, token, rows[-1]))
    return lines
