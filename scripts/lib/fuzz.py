"""Feed what a stranger could send to the parsers, guided by coverage (atheris).

Run by ``scripts/fuzz``, with libFuzzer's options. Nothing but the errors that the
parsers promise may come out, and these are short; what does is printed, and the input
written to ``crash-*``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

with atheris.instrument_imports(include=["synapse_replication"]):
    from txredisapi import InvalidData

    from synapse_replication.errors import RemoteProtocolError, RowDecodeError
    from synapse_replication.redis.resp import PureReader
    from synapse_replication.streams.registry import STANDARD_STREAMS
    from synapse_replication.streams.rows import decode_json, encode_json
    from synapse_replication.wire.batching import RdataRun, RefusedLine, read_lines
    from synapse_replication.wire.commands import encode_command
    from synapse_replication.wire.extension import encode_message, parse_message

_CODECS = [stream.description.codec for stream in STANDARD_STREAMS.values()]


def fuzz(data: bytes) -> None:
    """Read one input in every way."""
    kind, data = data[:1], data[1:]
    if kind < b"\x40":
        read_as_lines(data)
    elif kind < b"\x80":
        read_as_row(data)
    elif kind < b"\xc0":
        read_as_message(data)
    else:
        read_as_replies(data)


def be_short(error: Exception) -> None:
    assert len(str(error)) < 1000


def read_as_lines(data: bytes) -> None:
    for item in read_lines(data.split(b"\n")):
        if isinstance(item, RdataRun):
            assert len(item.tokens) == len(item.rows)
        elif isinstance(item, RefusedLine):
            be_short(item.error)
        else:
            (again,) = read_lines([encode_command(item)])
            assert again == item, (again, item)


def read_as_row(data: bytes) -> None:
    for codec in _CODECS:
        try:
            codec.decode([data])
        except RowDecodeError as error:
            be_short(error)
    try:
        value = decode_json(data)
    except ValueError:
        return
    try:
        text = encode_json(value)
    except ValueError:
        # A number that is too great for a float becomes Infinity, which is refused.
        return
    assert decode_json(text) == value


def read_as_message(data: bytes) -> None:
    try:
        message = parse_message(data)
    except RemoteProtocolError as error:
        be_short(error)
        return
    assert parse_message(encode_message(message)).positions == message.positions


def read_as_replies(data: bytes) -> None:
    reader = PureReader()
    try:
        for start in range(0, len(data), 7):
            reader.feed(data[start : start + 7])
            while reader.gets() is not False:
                pass
    except InvalidData:
        pass


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz)
    atheris.Fuzz()
