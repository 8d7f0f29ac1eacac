"""Integers at the edges of their types, from each place where they come in.

A token is a signed 64-bit integer on the wire, in PostgreSQL, in Spark and in Delta's
statistics. Any other number is refused where it is read, before arithmetic.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings, strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.journal import JournalSink
from synapse_replication.checksums import add_checksum
from synapse_replication.errors import (
    HttpCatchUpError,
    PipelineError,
    RemoteProtocolError,
    ReplicationError,
    StorageError,
    TokenError,
)
from synapse_replication.http import agent
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.location import InstanceLocation
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.recordings.reader import Record, read_records
from synapse_replication.streams.tokens import (
    MAX_TOKEN,
    MIN_TOKEN,
    MultiWriterStreamToken,
)
from synapse_replication.wire.commands import parse_command_from_line
from synapse_replication.wire.extension import encode_message, parse_message
from tests.handlers.fixtures import receiving

_EDGES = [0, 2**31, 2**32, 2**53, MAX_TOKEN, 2**64, 10**19, 10**30, 10**4000]
#: Numbers at and beside the edges of the types that store them, of both signs.
_NUMBERS = st.one_of(
    st.tuples(
        st.sampled_from(_EDGES), st.integers(-2, 2), st.sampled_from([1, -1])
    ).map(lambda parts: parts[2] * (parts[0] + parts[1])),
    st.integers(),
)
_TOKENS = _NUMBERS.filter(lambda number: MIN_TOKEN <= number <= MAX_TOKEN)
#: Lines with a number each; the text is that of the number.
_LINES = st.sampled_from(
    [
        "POSITION events w 0 {}",
        "POSITION events w {} 5",
        'RDATA events w {} ["x"]',
        "FEDERATION_ACK w {}",
        "USER_SYNC i1 @u:hs D start {}",
    ]
)
_settings = settings(derandomize=True, deadline=None, max_examples=100)


def fits(number: int) -> bool:
    """Return whether a number is a token."""
    return MIN_TOKEN <= number <= MAX_TOKEN


class WireTests(SynchronousTestCase):
    @_settings
    @given(_LINES, _NUMBERS)
    def test_lines(self, line: str, number: int) -> None:
        """A number beyond 64 bits is refused; any other is encoded as it was."""
        text = line.format(number)
        if fits(number):
            command: Any = parse_command_from_line(text)
            self.assertEqual(command.encode().decode(), text)
        else:
            self.assertRaises(RemoteProtocolError, parse_command_from_line, text)

    @_settings
    @given(_NUMBERS, _NUMBERS)
    def test_heartbeats(self, position: int, time: int) -> None:
        """The positions and the times of the extension are in range, or refused."""
        value = {
            "v": 1,
            "type": "heartbeat",
            "instance": "w1",
            "epoch": "e",
            "where": "h:1",
            "version": "1",
            "time": 5,
            "positions": {"events": [0, 0]},
        }
        payload = json.dumps(value).replace("[0, 0]", f"[{position}, {time}]")
        try:
            found = parse_message(payload.encode())
        except RemoteProtocolError:
            self.assertFalse(fits(position) and fits(time))
        else:
            self.assertTrue(fits(position) and fits(time))
            encode_message(found)

    @_settings
    @given(_NUMBERS, _NUMBERS)
    def test_responses(self, token: int, upto: int) -> None:
        """The tokens of a writer's response are in range, or refused."""
        body = f'{{"updates":[[{token},["x"]]],"upto_token":{upto},"limited":false}}'

        async def get(*arguments: Any, **options: Any) -> tuple[int, bytes]:
            return 200, body.encode()

        self.patch(agent, "get", get)
        instances = {"w1": InstanceLocation("127.0.0.1", 80)}
        unused: Any = object()
        client = HttpCatchUpClient(unused, instances, "s", Clock())
        asked = client.get_updates_since("typing", "w1", 0, 9)
        asking = Deferred.fromCoroutine(asked)
        if fits(token) and fits(upto):
            self.assertEqual(self.successResultOf(asking).upto_token, upto)
        else:
            self.failureResultOf(asking, HttpCatchUpError)

    @_settings
    @given(
        st.lists(_NUMBERS.filter(lambda number: number >= 0), min_size=1, max_size=4)
    )
    def test_vector_clocks(self, numbers: list[int]) -> None:
        """The text of a combined token has numbers of 64 bits, or is refused."""
        first, *more = map(str, numbers)
        text = f"m{first}" + "".join(f"~{n}.{each}" for n, each in enumerate(more))
        try:
            MultiWriterStreamToken.parse(text, str)
        except TokenError:
            self.assertFalse(all(map(fits, numbers)))
        else:
            self.assertTrue(all(map(fits, numbers)))


class ReceiverTests(SynchronousTestCase):
    @_settings
    @given(
        st.lists(
            st.tuples(st.sampled_from(["POSITION", "RDATA"]), _TOKENS, _TOKENS),
            max_size=8,
        )
    )
    def test_positions(self, steps: list[tuple[str, int, int]]) -> None:
        """
        Whatever a writer announces, a reader asks for ranges of tokens only, and fails
        with documented errors only.
        """
        process = receiving()
        for kind, first, second in steps:
            line = f"POSITION events w {first} {second}"
            if kind == "RDATA":
                line = f'RDATA events w {second} ["x"]'
            process.receive(line)
            process.host.reactor.pump([0.0, 1.0, 5.0])
        for _, low, high in process.stream.requests:
            self.assertTrue(fits(low) and fits(high), (low, high))
        for what, error in process.host.observer.failures:
            self.assertIsInstance(error, ReplicationError, what)
        self.assertTrue(all(fits(token) for _, token, _ in process.texts()))


class FileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())

    def journal(self) -> JournalSink:
        journal = JournalSink(self.path, lambda stream, row: row)
        self.addCleanup(journal.close)
        return journal

    @_settings
    @given(_NUMBERS)
    def test_journal(self, token: int) -> None:
        """A token of a journal is in range, or its line is damaged."""
        self.path.unlink(missing_ok=True)
        text = f'{{"stream":"s","writer":"w","token":{token},"rows":[]}}'
        self.path.write_bytes(add_checksum(text.encode()))
        if not fits(token):
            self.assertRaises(StorageError, self.journal)
            return
        journal = self.journal()
        self.assertEqual(journal.saved_positions(), {("s", "w"): token})
        journal.on_rdata("s", "w2", token, [])
        journal.close()
        found = self.journal().saved_positions()
        self.assertEqual(found, {("s", "w"): token, ("s", "w2"): token})

    @_settings
    @given(_NUMBERS)
    def test_recording(self, number: int) -> None:
        """A time of a recording is in a range of years, or its line is an error."""
        line = f'{{"line":"PING 5","time_ms":{number}}}\n'.encode()
        lines = iter([line, b""])
        (found,) = read_records(lambda size: next(lines))
        is_valid = 0 <= number <= 253_402_300_799_999
        self.assertEqual(isinstance(found, Record), is_valid, found)

    @_settings
    @given(_NUMBERS, _NUMBERS)
    def test_offsets(self, minimum: int, position: int) -> None:
        """A position of an archive's offset is in range, or an error."""
        value = {"minimum": minimum, "writers": {"w": position}}
        is_valid = 0 <= minimum <= MAX_TOKEN and 0 <= position <= MAX_TOKEN
        try:
            found = StreamOffset.from_json(value)
        except PipelineError:
            self.assertFalse(is_valid)
        else:
            self.assertTrue(is_valid)
            self.assertTrue(fits(found.furthest) and fits(found.least))
