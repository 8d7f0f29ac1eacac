"""Tests of the receivers of one stream with random orders of events.

Rows of three writers arrive over one link or two, in chunks, in batches, interleaved or
garbled. Meanwhile the sink and the source answer late, or fail, and the queue
overflows. In the end, each writer's rows were delivered: of a stream that is not
idempotent, all, once and in order, and each batch as a whole.
"""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase
from typing_extensions import override

from synapse_replication.handlers.receiving import receiver, writer_receiver
from synapse_replication.handlers.receiving.context import ReceiverOptions
from tests.handlers.fixtures import receiving

_WRITERS = ("a", "b", "c")
_SEEDS = 150
#: The time after which everything that was received was handled or fetched, in s.
_REST = 200.0


class _Course:
    """One course of events; a seed determines it."""

    def __init__(self, seed: int, *, idempotent: bool) -> None:
        self.random = random = Random(seed)
        self.process = receiving(
            receiver=ReceiverOptions(
                max_queue_size=random.choice([200, 400, 1000, 3000, 10_000]),
                max_batch_rows=random.choice([3, 100]),
                break_after_rows=random.choice([4, 10_000]),
            ),
            page_rows=random.choice([1, 3, 100]),
            idempotent=idempotent,
        )
        connections = [self.process.connection]
        if random.random() < 0.5:
            connections.append(self.process.connect())
        #: The lines that are on their way, by connection.
        self.lines = {
            connection: [f"POSITION events {writer} 0 0" for writer in _WRITERS]
            for connection in connections
        }
        self.batches: dict[str, list[tuple[int, list[str]]]] = {
            writer: [] for writer in _WRITERS
        }
        self.has_faults = random.random() < 0.5
        self.interleaves = random.random() < 0.4

    def last_token(self, writer: str) -> int:
        batches = self.batches[writer]
        return batches[-1][0] if batches else 0

    def write(self, writer: str, *, garbled: bool = False) -> None:
        """Commit a batch of rows, and send it on each connection."""
        random = self.random
        token = self.last_token(writer) + random.randint(1, 2)
        texts = [
            f"{writer} {token} {row}"
            for row in range(random.choice([1, 1, 1, 2, 3, 5]))
        ]
        self.process.stream.persist(writer, token, *([text] for text in texts))
        self.batches[writer].append((token, texts))
        ends = ["batch"] * (len(texts) - 1) + [str(token)]
        rows = [f'["{text}"]' for text in texts]
        if garbled:
            rows[random.randrange(len(rows))] = random.choice(["[1", "[1,2,3]"])
        for waiting in self.lines.values():
            waiting += [
                f"RDATA events {writer} {end} {row}"
                for end, row in zip(ends, rows, strict=True)
            ]

    def announce(self, writer: str) -> None:
        token = self.last_token(writer)
        for waiting in self.lines.values():
            waiting.append(f"POSITION events {writer} {token} {token}")

    def arrive(self) -> None:
        """Let some lines of a connection arrive together."""
        connection = self.random.choice(list(self.lines))
        count = self.random.randint(1, 12)
        lines, self.lines[connection] = (
            self.lines[connection][:count],
            self.lines[connection][count:],
        )
        if lines:
            self.process.receive(*lines, connection=connection)

    def fails(self) -> bool:
        return self.has_faults and self.random.random() < 0.15

    def answer(self) -> None:
        """Let the sink or the source answer, or fail."""
        stream, sink = self.process.stream, self.process.host.rows
        if sink.holds and self.random.random() < 0.6:
            sink.release(RuntimeError() if self.fails() else None)
        elif stream.waiting:
            if self.fails():
                stream.fail(RuntimeError())
            else:
                stream.answer()

    def step(self) -> None:
        random = self.random
        writer = random.choice(_WRITERS)
        kind = random.random()
        if kind < 0.35:
            if not self.interleaves and random.random() < 0.85:
                writer = _WRITERS[0]
            self.write(writer, garbled=self.has_faults and random.random() < 0.1)
        elif kind < 0.6:
            self.arrive()
        elif kind < 0.68:
            self.process.host.rows.is_held = random.random() < 0.6
        elif kind < 0.72:
            self.process.stream.is_held = random.random() < 0.6
        elif kind < 0.95:
            self.answer()
        elif kind < 0.98:
            self.process.host.reactor.advance(random.choice([0, 0.1, 1]))
        else:
            self.announce(writer)

    def rest(self) -> None:
        """Let everything arrive, and let sink and source answer."""
        stream, sink = self.process.stream, self.process.host.rows
        reactor = self.process.host.reactor
        while any(self.lines.values()):
            self.arrive()
        sink.is_held = stream.is_held = False
        end = reactor.seconds() + _REST
        while reactor.seconds() < end:
            if sink.holds:
                sink.release()
            if stream.waiting:
                stream.answer()
            if not sink.holds and not stream.waiting and not reactor.getDelayedCalls():
                return
            reactor.advance(0.5)

    def run(self) -> None:
        for _ in range(self.random.randint(10, 120)):
            self.step()
        # The rows of a garbled line are fetched when the writer writes again.
        for _ in range(2):
            self.rest()
            for writer in _WRITERS:
                self.write(writer)
        self.rest()


class RandomOrdersTests(SynchronousTestCase):
    @override
    def setUp(self) -> None:
        self.patch(receiver, "SLICE", 3)
        self.patch(writer_receiver, "SLICE", 3)

    def delivered(self, course: _Course) -> dict[str, list[tuple[int, list[str]]]]:
        found: dict[str, list[tuple[int, list[str]]]] = {
            writer: [] for writer in _WRITERS
        }
        for writer, token, texts in course.process.texts():
            found[writer].append((token, texts))
        return found

    def test_once_and_in_order(self) -> None:
        """Each batch is delivered once, as a whole and in order."""
        for seed in range(_SEEDS):
            course = _Course(seed, idempotent=False)
            course.run()
            self.assertEqual(self.delivered(course), course.batches, f"seed {seed}")

    def test_idempotent(self) -> None:
        """Each batch of an idempotent stream is delivered as a whole."""
        for seed in range(_SEEDS):
            course = _Course(seed, idempotent=True)
            course.run()
            delivered = self.delivered(course)
            for writer, batches in course.batches.items():
                for batch in batches:
                    self.assertIn(batch, delivered[writer], f"seed {seed}")
                for batch in delivered[writer]:
                    self.assertIn(batch, batches, f"seed {seed}")
