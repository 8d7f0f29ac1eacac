"""Fuzzes the parsers of untrusted input, guided by coverage (atheris).

``scripts/fuzz`` runs this program. Each parser is a target of its own, with a corpus
that begins with well-formed input. The targets take turns; each turn is a process,
forked when all modules are loaded and instrumented.

The parsers may raise only their documented errors, with bounded texts. Any other
exception, an input that takes 20 minutes, or one that takes 2 GiB of memory, is a
finding: it is printed, and its input is kept.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import atheris
import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

with atheris.instrument_imports(include=["synapse_replication"]):
    from twisted.internet.defer import Deferred
    from twisted.internet.testing import MemoryReactorClock, StringTransport
    from txredisapi import InvalidData

    from synapse_replication.app.journal import JournalSink
    from synapse_replication.checksums import add_checksum
    from synapse_replication.config.yaml_files import read_files
    from synapse_replication.errors import (
        HttpCatchUpError,
        PipelineError,
        RemoteProtocolError,
        RowDecodeError,
        StorageError,
        TokenError,
    )
    from synapse_replication.http.agent import make_agent
    from synapse_replication.http.client import HttpCatchUpClient
    from synapse_replication.http.location import InstanceLocation
    from synapse_replication.pipeline.archive import log
    from synapse_replication.pipeline.archive.files import files_of
    from synapse_replication.pipeline.archive.store import ArchiveStore
    from synapse_replication.recordings.reader import decompressed, read_records
    from synapse_replication.redis.resp import ReplyParser
    from synapse_replication.streams.rows import decode_json, encode_json
    from synapse_replication.streams.standard.registry import STANDARD_STREAMS
    from synapse_replication.streams.tokens import MultiWriterStreamToken
    from synapse_replication.wire.connection import MAX_LINE_LENGTH, LineConnection
    from synapse_replication.wire.extension import (
        ExtensionLine,
        encode_message,
        parse_message,
    )
    from synapse_replication.wire.rdata import (
        InterleavedGroup,
        RdataGroup,
        RefusedLine,
        read_lines,
    )

#: The longest turn of a target, in s.
_LONGEST_TURN = 120.0
#: The line of libFuzzer's statistics with the number of inputs.
_EXECUTED = re.compile(r"^stat::number_of_executed_units: (\d+)$", re.MULTILINE)
#: The number of lines of a finding that are printed.
_SHOWN_LINES = 40

#: A program that reads one input.
Reader: TypeAlias = Callable[[bytes], None]

_SEED_LINES = b"""SERVER hs.example
NAME w1
PING 1700000000000 replication_ext/1
REPLICATE
POSITION events w1 1 5
RDATA events w1 batch ["ev",["$e","!r:hs","m.room.message",null,null,null,false,false]]
RDATA events w1 6 ["state",["$e","!r:hs","m.room.member","@u:hs",null,null,null]]
RDATA caches w1 7 ["get_user",["@u:hs"],1700000000000]
USER_SYNC i1 @u:hs My Phone start 1700000000000
USER_SYNC i1 @u:hs end 1700000000000
CLEAR_USER_SYNC i1
FEDERATION_ACK w1 5
USER_IP @u:hs ["token","192.0.2.1","agent",null,1700000000000]
REMOTE_SERVER_UP other.example
LOCK_RELEASED ["w1","lock","key"]
NEW_ACTIVE_TASK abc
CANCEL_TASK abc
REMOVE_PUSHER app key @u:hs
INVALIDATE_CACHE get_user ["@u:hs"]
ERROR no
"""
_SEED_MESSAGE = json.dumps(
    {
        "v": 1,
        "type": "heartbeat",
        "instance": "w1",
        "epoch": "abc",
        "where": "h:1",
        "version": "0.1.0",
        "time": 1700000000000,
        "positions": {"events": [1847, 1699999999000]},
        "backlog": False,
    }
).encode()
_SEED_REPLIES = (
    b"*3\r\n$7\r\nmessage\r\n$2\r\nhs\r\n$7\r\nPING 12\r\n"
    b"+OK\r\n:5\r\n$-1\r\n*-1\r\n-ERR no\r\n*2\r\n*1\r\n:-1\r\n$0\r\n\r\n"
)

_SEED_RECORDING = add_checksum(
    b'{"t":1.5,"time_ms":1700000000000,"channel":"hs","line":"PING 5"}'
)
_SEED_JOURNAL = add_checksum(
    b'{"stream":"typing","writer":"w1","token":7,"rows":[["!r",[]]],"epoch":"a"}'
)
_SEED_YAML = b"""server_name: hs.example
redis: &r {enabled: true, host: "h", port: 6379}
synapse_replication: {<<: *r, streams: [a, 1, 2024-01-01, null, ~, 0x1f, !!str 5]}
"""
_SEED_DELTA = b"\n".join(
    json.dumps(action).encode()
    for action in (
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {
            "metaData": {
                "id": "5fba94ed-9794-4965-ba6e-6ee3c0d22af9",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps(
                    {
                        "type": "struct",
                        "fields": [
                            {
                                "name": name,
                                "type": kind,
                                "nullable": True,
                                "metadata": {},
                            }
                            for name, kind in (("stream_id", "long"), ("day", "date"))
                        ],
                    }
                ),
                "partitionColumns": ["day"],
                "configuration": {
                    "synapse_replication.purged": json.dumps({"w1": [2, 5]})
                },
                "createdTime": 1700000000000,
            }
        },
        {"txn": {"appId": "synapse_replication.archive", "version": 3}},
        {"txn": {"appId": "recording/a.jsonl", "version": 77}},
        {
            "add": {
                "path": "day=2026-01-01/a.parquet",
                "partitionValues": {"day": "2026-01-01"},
                "size": 100,
                "modificationTime": 1700000000000,
                "dataChange": True,
                "stats": json.dumps(
                    {
                        "numRecords": 2,
                        "minValues": {"stream_id": 6},
                        "maxValues": {"stream_id": 7},
                        "nullCount": {"stream_id": 0},
                    }
                ),
            }
        },
        {
            "commitInfo": {
                "timestamp": 1700000000000,
                "synapse_replication.offset": json.dumps(
                    {"minimum": 5, "writers": {"w1": 7}}
                ),
                "synapse_replication.batch": "3",
                "synapse_replication.written_by": "process 1 on host",
            }
        },
    )
)
_SEED_ANSWER = b'{"updates":[[7,["!r",[]]]],"upto_token":7,"limited":false}'

_CODECS = [stream.description.codec for stream in STANDARD_STREAMS.values()]


def seeds() -> dict[str, list[bytes]]:
    """Return the well-formed inputs with which the corpus of each target begins."""
    lines = _SEED_LINES.splitlines()
    rows = [line.split(b" ", 4)[4] for line in lines if b"RDATA" in line]
    rows += [
        json.dumps(row).encode()
        for row in (
            ["!r:hs", ["@u:hs"]],
            ["!r:hs", "m.read", "@u:hs", "$e", None, {"ts": 1.5}],
            ["@u:hs", "online", 1, 2, 3, "text", True],
            {"a": [1, {"b": None}], "c": "\u00e9\ud83d\ude00"},
        )
    ]
    both = _SEED_LINES + b"REPLICATION_EXT " + _SEED_MESSAGE + b"\nPING 5\n"
    recording = _SEED_RECORDING + b'{"line":"PING 6"}\n'
    old_journal = b'{"stream":"s","writer":"w","token":7,"rows":[]}\n'
    return {
        "lines": [*lines, _SEED_LINES],
        "row": [bytes([n]) + row for n in range(len(_CODECS)) for row in rows],
        "message": [_SEED_MESSAGE],
        "replies": [_SEED_REPLIES],
        "server": [b"NAME w1\n" + both.partition(b"\n")[2]],
        "client": [both],
        "token": [b"5", b"m5~1.7~2.9", b"m-5~1.7"],
        "recording": [recording, gzip.compress(recording), lzma.compress(recording)],
        "journal": [old_journal + _SEED_JOURNAL],
        "yaml": [_SEED_YAML],
        "response": _seed_responses(),
        "delta-log": [_SEED_DELTA],
    }


def _seed_responses() -> list[bytes]:
    found = []
    for body, more in (
        (_SEED_ANSWER, b""),
        (gzip.compress(_SEED_ANSWER), b"Content-Encoding: gzip\r\n"),
    ):
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(body)
        found.append(head + more + b"\r\n" + body)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_SEED_ANSWER), _SEED_ANSWER)
    return [*found, chunked + body]


def check_length(error: Exception) -> None:
    """Check that an error's text is bounded."""
    assert len(str(error)) < 1000


def read_as_lines(data: bytes) -> None:
    """Read data as lines of the wire."""
    for item in read_lines(data.split(b"\n")):
        if isinstance(item, RdataGroup):
            assert len(item.tokens) == len(item.rows)
        elif isinstance(item, InterleavedGroup):
            assert len(item.tokens) == len(item.rows) == len(item.instance_names)
        elif isinstance(item, RefusedLine):
            check_length(item.error)
        else:
            (again,) = read_lines([item.encode()])
            assert again == item, (again, item)


def read_as_row(data: bytes) -> None:
    """Read data as a row of the stream that the first byte chooses."""
    codec = _CODECS[data[0] % len(_CODECS)] if data else _CODECS[0]
    row = data[1:]
    try:
        codec.decode([row])
    except RowDecodeError as error:
        check_length(error)
    try:
        value = decode_json(row)
    except ValueError:
        return
    try:
        text = encode_json(value)
    except ValueError:
        # A number that is too large for a float becomes Infinity, which is rejected.
        return
    assert decode_json(text) == value


def read_as_message(data: bytes) -> None:
    """Read data as a message of the extension."""
    try:
        message = parse_message(data)
    except RemoteProtocolError as error:
        check_length(error)
        return
    assert parse_message(encode_message(message)).positions == message.positions


def read_as_replies(data: bytes) -> None:
    """Read data as replies of Redis."""
    reader = ReplyParser()
    try:
        for start in range(0, len(data), 7):
            reader.feed(data[start : start + 7])
            while reader.gets() is not False:
                pass
    except InvalidData:
        pass


def read_on_connection(data: bytes, *, is_server: bool) -> None:
    """Feed data to a connection that uses the extension.

    The data determines the size of the pieces in which it arrives.
    """
    connection = LineConnection(
        "hs.example", 0.0, is_server=is_server, speaks_extension=True
    )
    size = max(data[0] + 1 if data else 1, len(data) // 50)
    sent = 0
    for now, start in enumerate(range(1, len(data), size)):
        received = connection.receive_data(data[start : start + size], float(now))
        for item in received.items:
            if isinstance(item, ExtensionLine):
                assert connection.extension_agreed or not connection.is_open
                read_as_message(item.payload)
        for error in received.refused:
            check_length(error)
        connection.tick(float(now))
        sent += len(connection.data_to_send())
        assert len(connection.close_text) < 2000
    # The connection sends at most one ERROR with the reason for closing.
    assert sent < 2000
    assert len(connection._line_start or b"") <= MAX_LINE_LENGTH + size  # noqa: SLF001 -- what it fuzzes


def read_as_token(data: bytes) -> None:
    """Read data as a token."""
    try:
        token = MultiWriterStreamToken.parse(data.decode("utf-8", "replace"), str)
    except TokenError as error:
        check_length(error)
        return
    assert token.get_max_stream_pos() >= token.stream
    assert MultiWriterStreamToken.parse(token.to_string(int), str) == token


def read_as_recording(data: bytes) -> None:
    """Read data as a recording, compressed or not."""
    for item in read_records(decompressed(io.BytesIO(data)).readline):
        if isinstance(item, Exception):
            check_length(item)


def read_as_journal(folder: str, data: bytes) -> None:
    """Open data as a journal; what it then contains is read again as it was."""
    path = Path(folder, "journal")
    path.write_bytes(data)
    try:
        journal = JournalSink(path, lambda stream, row: row)
    except StorageError as error:
        check_length(error)
        return
    journal.on_position("fuzz", "w", 5)
    saved = journal.saved_positions()
    journal.close()
    again = JournalSink(path, lambda stream, row: row)
    assert again.saved_positions() == saved, (saved, again.saved_positions())
    again.close()


def read_as_yaml(folder: str, data: bytes) -> None:
    """Read data as a file of the configuration."""
    path = Path(folder, "fuzz.yaml")
    path.write_bytes(data)
    for problem in read_files([str(path)]).problems:
        assert len(str(problem)) < 1000, problem


def read_as_response(data: bytes) -> None:
    """Read data as a writer's response to a request for rows."""
    reactor: Any = MemoryReactorClock()  # type: ignore[no-untyped-call]
    instances = {"w1": InstanceLocation(host="127.0.0.1", port=80)}
    agent, _ = make_agent(reactor, instances)
    client = HttpCatchUpClient(agent, instances, "secret", reactor)
    asked = Deferred.fromCoroutine(client.get_updates_since("typing", "w1", 0, 9))
    errors: list[Any] = []
    asked.addErrback(errors.append)
    (connecting,) = reactor.tcpClients
    protocol = connecting[2].buildProtocol(None)
    transport: Any = StringTransport()  # type: ignore[no-untyped-call]
    transport.abortConnection = transport.loseConnection
    protocol.makeConnection(transport)
    size = max(1, len(data) // 4)
    for start in range(0, len(data), size):
        protocol.dataReceived(data[start : start + size])
        reactor.advance(0)
    reactor.pump([0.0] * 5 + [60.0])
    for failure in errors:
        failure.trap(HttpCatchUpError)
        check_length(failure.value)
    assert asked.called


def read_as_delta_log(folder: str, data: bytes) -> None:
    """Read data as the log of a table of an archive."""
    store = ArchiveStore(str(Path(folder, "archive")))
    uri = store.stream_uri("fuzz")
    commit = Path(uri, "_delta_log", f"{0:020}.json")
    commit.parent.mkdir(parents=True, exist_ok=True)
    commit.write_bytes(data)
    try:
        table = store.table(uri)
        if table is None:
            return
        state = log.read_state(table)
        log.committer_of(table, state.batch)
        log.archived_size(table, "a.jsonl")
        log.offsets_around(table, [1])
        log.read_purged_ranges(table, "fuzz")
        files_of(table, uri, "fuzz")
    except PipelineError as error:
        check_length(error)


def readers(folder: str) -> Mapping[str, Reader]:
    """Return the targets.

    :param folder: an empty folder for inputs that are files.
    """
    return {
        "lines": read_as_lines,
        "row": read_as_row,
        "message": read_as_message,
        "replies": read_as_replies,
        "server": partial(read_on_connection, is_server=True),
        "client": partial(read_on_connection, is_server=False),
        "token": read_as_token,
        "recording": read_as_recording,
        "journal": partial(read_as_journal, folder),
        "yaml": partial(read_as_yaml, folder),
        "response": read_as_response,
        "delta-log": partial(read_as_delta_log, folder),
    }


def take_turn(target: str, seconds: float, corpus: Path, work: Path) -> tuple[int, str]:
    """Fuzz one target in a process of its own.

    :param corpus: the folder with the corpora of all targets; findings are kept there.
    :param work: a folder for temporary files.
    :return: the number of inputs, and the text of a finding, which is empty without
        one.
    """
    inputs, output = corpus / target, work / "output"
    inputs.mkdir(exist_ok=True)
    for number, data in enumerate(seeds()[target]):
        (inputs / f"seed-{number}").write_bytes(data)
    child = os.fork()
    if child == 0:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # libFuzzer ends the process.
        atheris.Setup(
            [
                "fuzz",
                f"-max_total_time={max(1, round(seconds))}",
                "-print_final_stats=1",
                f"-artifact_prefix={corpus / target}-",
                str(inputs),
            ],
            readers(str(work))[target],
        )
        atheris.Fuzz()
    _, status = os.waitpid(child, 0)
    text = output.read_text("utf-8", "replace")
    executed = _EXECUTED.search(text)
    shown = "\n".join(text.splitlines()[-_SHOWN_LINES:]) if status else ""
    return int(executed[1]) if executed else 0, shown


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", type=float, default=600.0, show_default=True)
@click.option(
    "--target",
    "targets",
    type=click.Choice(list(seeds())),
    multiple=True,
    default=list(seeds()),
)
@click.argument("corpus", type=click.Path(file_okay=False, path_type=Path))
def main(seconds: float, targets: tuple[str, ...], corpus: Path) -> None:
    """Fuzz the parsers of untrusted input for a time, guided by coverage.

    CORPUS is a folder with the inputs of earlier runs, a folder for each target. New
    inputs that reach new code are added, and each finding (``TARGET-crash-*``).
    """
    corpus.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(targets, 0)
    findings = 0
    end = time.monotonic() + seconds
    turn = min(_LONGEST_TURN, seconds / len(targets))
    with tempfile.TemporaryDirectory() as work:
        while (left := end - time.monotonic()) > 0:
            target = targets[0]
            count, finding = take_turn(target, min(turn, left), corpus, Path(work))
            targets = (*targets[1:], target)
            counts[target] += count
            if finding:
                findings += 1
                click.echo(f"{target}:\n{finding}")
            click.echo(f"{target}: {count:,}; {sum(counts.values()):,} in all")
    click.echo()
    for target, count in counts.items():
        click.echo(f"{target:<12}{count:>14,}")
    click.echo(f"{'in all':<12}{sum(counts.values()):>14,}; {findings} findings")
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
