"""RDATA lines, many at a time: from lines to runs of rows, and back.

Theory of operation: nearly every line of a busy link is RDATA, so those are not
made into commands one by one. :func:`read_lines` takes the lines that arrived
together and gathers them by stream into :class:`RdataRun` objects, two parallel
lists of tokens and of rows. The rows stay JSON text: whoever takes them out of
a queue decodes them, with the types of their stream, and text is the smallest
form in which they can wait. Every other line becomes a command.

What keeps its order: the rows of one stream, of all its writers; and every other
command against all rows before and after it. Rows of different streams between
two other commands may be regrouped.

Spec, sections 2 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import attrs

from synapse_replication.errors import (
    RemoteProtocolError,
    UnparsableLineError,
)
from synapse_replication.wire.commands import (
    BATCH,
    Command,
    parse_command_from_line,
    parse_token,
)

__all__ = ["RdataRun", "ReceivedItem", "RefusedLine", "rdata_lines", "read_lines"]

_BATCH = BATCH.encode()
#: Fewer digits than the greatest 64-bit integer has: no need to compare.
_SAFE_DIGITS = 18


@attrs.define
class RdataRun:
    """Rows of one writer of one stream that arrived one after the other.

    :ivar tokens: the token of each row, ``None`` in all but the last row of a
        batch. A batch may go on in a later run of the same writer.
    :ivar rows: the JSON text of each row, not looked at yet; as long as
        ``tokens``.
    """

    stream_name: str
    instance_name: str
    tokens: list[int | None] = attrs.Factory(list)
    rows: list[bytes] = attrs.Factory(list)


@attrs.frozen
class RefusedLine:
    """A line that is no command.

    :ivar error: what is wrong with it.
    :ivar stream_name: the stream, if a row of it was lost with the line.
    :ivar instance_name: the writer, if a row of it was lost with the line.
    """

    error: RemoteProtocolError
    stream_name: str | None = None
    instance_name: str | None = None


ReceivedItem: TypeAlias = RdataRun | Command | RefusedLine


def read_lines(lines: Sequence[bytes]) -> list[ReceivedItem]:
    """Read lines that arrived together.

    A run ends at every line that is not RDATA, and at a row of another writer of
    its stream. Blank lines are passed over. Never raises: what does not parse is
    in the answer, in its place.

    :param lines: in the order of arrival, without their ends.
    """
    items: list[ReceivedItem] = []
    # The newest run of each stream, with its writer's name: it may still grow.
    open_runs: dict[bytes, tuple[bytes, RdataRun]] = {}
    # Whose run ``tokens`` and ``rows`` belong to.
    last_stream: bytes | None = None
    last_writer = b""
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
                if writer != last_writer or stream != last_stream:
                    known = open_runs.get(stream)
                    if known is None or known[0] != writer:
                        if not stream or not writer:
                            raise ValueError("a field is empty")
                        tokens, rows = [], []
                        run = RdataRun(stream.decode(), writer.decode(), tokens, rows)
                        open_runs[stream] = writer, run
                        items.append(run)
                    else:
                        tokens, rows = known[1].tokens, known[1].rows
                    last_stream, last_writer = stream, writer
            except ValueError as error:
                items.append(_refuse(words, UnparsableLineError("RDATA", str(error))))
            else:
                tokens.append(token)
                rows.append(row)
                continue
        elif line:
            items.append(_read_other_line(line, words))
        else:
            continue
        open_runs.clear()
        last_stream = None
    return items


def _read_token(text: bytes) -> int | None:
    return None if text == _BATCH else parse_token(text.decode())


def _read_other_line(line: bytes, words: list[bytes]) -> Command | RefusedLine:
    try:
        return parse_command_from_line(line.decode())
    except UnicodeDecodeError:
        name = words[0].decode("utf-8", "replace")
        error: RemoteProtocolError = UnparsableLineError(name, "it is not UTF-8")
    except RemoteProtocolError as raised:
        error = raised
    return _refuse(words, error)


def _refuse(words: list[bytes], error: RemoteProtocolError) -> RefusedLine:
    if words[0] != b"RDATA" or len(words) < 3:
        return RefusedLine(error)
    stream_name, instance_name = (
        word.decode("utf-8", "replace") for word in words[1:3]
    )
    return RefusedLine(error, stream_name, instance_name)


def rdata_lines(
    stream_name: str,
    instance_name: str,
    batches: Iterable[tuple[int, Sequence[bytes]]],
) -> list[bytes]:
    """Write RDATA lines, without their ends.

    :param batches: a token, and the JSON texts of its rows: at least one.
    """
    head = f"RDATA {stream_name} {instance_name} ".encode()
    batch_head = head + _BATCH + b" "
    lines: list[bytes] = []
    for token, rows in batches:
        if len(rows) > 1:
            lines += [batch_head + row for row in rows[:-1]]
        lines.append(b"%b%d %b" % (head, token, rows[-1]))
    return lines
