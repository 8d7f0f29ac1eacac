"""Tests of the order in which parked rows and the rest of other rows are handled."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.handlers.receiving.writer_receiver import SLICE
from tests.handlers.fixtures import Receiving, receiving

#: The maximum size of the queue, and the number of rows of one byte that exceed it.
SIZE = 500 * SLICE
OVERFLOW = SIZE // 80 + 1


def connected(last: int) -> Receiving:
    """Make a reader of the writers a, b and w, with rows of w up to ``last``."""
    fixture = receiving(
        receiver=ReceiverOptions(max_queue_size=SIZE), page_rows=10 * SLICE
    )
    fixture.receive(*(f"POSITION events {writer} 0 0" for writer in "abw"))
    for token in range(1, last + 1):
        fixture.stream.persist("w", token, [str(token)])
    return fixture


def lines(start: int, stop: int) -> list[str]:
    """Return the RDATA lines of w for a range of tokens."""
    return [f'RDATA events w {token} ["{token}"]' for token in range(start, stop)]


def overflow(fixture: Receiving) -> None:
    """Have rows of another writer given up, for the writer b."""
    row = 'RDATA events b 1 ["b"]'
    fixture.receive(*[row] * (OVERFLOW // 2 + 1))
    fixture.receive(*[row] * (OVERFLOW // 2 + 1))


def release(fixture: Receiving) -> None:
    fixture.host.rows.is_held = False
    while fixture.host.rows.holds:
        fixture.host.rows.release()


def answer(fixture: Receiving) -> None:
    fixture.stream.is_held = False
    while fixture.stream.waiting:
        fixture.stream.answer()


class RestTests(SynchronousTestCase):
    """The rest of rows, while the sink handles those that arrived with them."""

    def test_rest_without_later_rows_of_its_writer(self) -> None:
        """The rest is fetched at once, though only rows of another writer overflow."""
        for others in ([], ['RDATA events a 1 ["a"]']):
            fixture = connected(SLICE + 51)
            fixture.stream.persist("b", 1, ["b"])
            fixture.host.rows.is_held = True
            # With a row of another writer, the rows are interleaved.
            fixture.receive(*others, *lines(1, SLICE + 51))
            overflow(fixture)
            release(fixture)
            tokens = list(range(1, SLICE + 51))
            self.assertEqual(fixture.host.rows.tokens("w"), tokens)
            fixture.receive(*lines(SLICE + 51, SLICE + 52))
            self.assertEqual(fixture.host.rows.tokens("w"), [*tokens, SLICE + 51])

    def test_rest_after_later_rows_of_its_batch(self) -> None:
        """The rest is a batch's beginning, and does not follow later rows of it."""
        fixture = connected(SLICE)
        whole = [str(token) for token in range(OVERFLOW + 2)]
        fixture.stream.persist("w", 4 * SLICE, *([text] for text in whole))
        batch = [f'RDATA events w batch ["{text}"]' for text in whole]
        fixture.host.rows.is_held = True
        fixture.receive(*lines(1, SLICE + 1), batch[0])
        fixture.receive(*batch[1 : OVERFLOW // 2])
        fixture.receive(*batch[OVERFLOW // 2 : -1])
        release(fixture)
        fixture.receive(f'RDATA events w {4 * SLICE} ["{whole[-1]}"]')
        self.assertEqual(fixture.texts()[-1], ("w", 4 * SLICE, whole))
        self.assertEqual(len(fixture.texts()), SLICE + 1)

    def test_later_rows_of_a_batch_during_rows_of_a_slice(self) -> None:
        """Rows of a slice do not hide that the beginning of a later batch was lost."""
        # The sink handles the first row, alone or with one of another writer.
        for first in ('RDATA events w batch ["0"]', 'RDATA events a 1 ["a"]'):
            fixture = connected(1)
            fixture.stream.persist("w", 2, ["c"])
            whole = [str(token) for token in range(OVERFLOW + 2)]
            fixture.stream.persist("w", 3, *([text] for text in whole))
            batch = [f'RDATA events w batch ["{text}"]' for text in whole[:-1]]
            fixture.host.rows.is_held = True
            fixture.receive(first, *lines(1, 2), 'RDATA events w 2 ["c"]')
            fixture.receive(*batch[: OVERFLOW // 2])
            fixture.receive(*batch[OVERFLOW // 2 :])
            release(fixture)
            fixture.receive(f'RDATA events w 3 ["{whole[-1]}"]')
            self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3])
            self.assertEqual(fixture.texts()[-1], ("w", 3, whole))

    def test_rest_after_parked_rows(self) -> None:
        """The rest of interleaved rows is given up after those that were parked."""
        fixture = connected(4)
        fixture.stream.persist("w", 5, ["x"], ["y"])
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 1 1")
        fixture.host.rows.is_held = True
        others = [f'RDATA events a {token} ["a"]' for token in range(1, SLICE)]
        # A slice with an unfinished batch is not decoded as a whole.
        fixture.receive(
            *lines(2, 5),
            'RDATA events a batch ["a"]',
            *others,
            'RDATA events w batch ["x"]',
        )
        overflow(fixture)
        release(fixture)
        answer(fixture)
        fixture.receive('RDATA events w 5 ["y"]')
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3, 4, 5])
        self.assertEqual(fixture.texts()[-1], ("w", 5, ["x", "y"]))


class ParkedTests(SynchronousTestCase):
    """Rows that arrive while a page is fetched."""

    def test_rest_before_later_rows(self) -> None:
        """
        Parked rows that lead to another fetch, in the middle, are not overtaken by
        rows that were parked after them.
        """
        fixture = connected(3 * SLICE)
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 1 1")
        unreadable = "RDATA events w 2 {}"
        fixture.receive(unreadable, *lines(3, 3 * SLICE))
        fixture.receive(*lines(3 * SLICE, 3 * SLICE + 1))
        answer(fixture)
        self.assertEqual(fixture.host.rows.tokens("w"), list(range(1, 3 * SLICE + 1)))

    def test_rest_given_up_before_later_rows(self) -> None:
        """
        If the queue overflows while parked rows are handled, the rest of them is given
        up before the beginning of a batch that was parked after them.
        """
        fixture = connected(3 * SLICE)
        fixture.stream.persist("w", 4 * SLICE, ["x"], ["y"])
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 1 1")
        fixture.receive(*lines(2, 3 * SLICE + 1))
        fixture.receive('RDATA events w batch ["x"]')
        fixture.host.rows.is_held = True
        fixture.stream.is_held = False
        fixture.stream.answer()
        fixture.host.rows.release()
        overflow(fixture)
        release(fixture)
        fixture.receive(f'RDATA events w {4 * SLICE} ["y"]')
        tokens = [*range(1, 3 * SLICE + 1), 4 * SLICE]
        self.assertEqual(fixture.host.rows.tokens("w"), tokens)
        self.assertEqual(fixture.texts()[-1], ("w", 4 * SLICE, ["x", "y"]))

    def test_given_up_before_later_rows(self) -> None:
        """
        The beginning of a batch that is parked is given up before the batch's end, and
        joins no later batch.
        """
        fixture = connected(2)
        other = fixture.connect()
        fixture.receive("POSITION events w 0 0", connection=other)
        fixture.stream.persist("w", 3, ["x"], ["y"])
        for token in (4, 5):
            fixture.stream.persist("w", token, [str(token)])
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 4 4", connection=other)
        # The link on which rows arrive is slower than the other one.
        fixture.receive('RDATA events w batch ["x"]')
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events a 1 ["a"]')
        answer(fixture)
        fixture.receive('RDATA events w 3 ["y"]')
        overflow(fixture)
        release(fixture)
        fixture.receive(*lines(5, 6))
        self.assertEqual(
            [texts for writer, _, texts in fixture.texts() if writer == "w"],
            [["1"], ["2"], ["x", "y"], ["4"], ["5"]],
        )

    def test_lost_row(self) -> None:
        """A lost row that is parked is handled after the rows before it."""
        fixture = connected(2)
        fixture.stream.persist("w", 3, ["x"], ["y"])
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 1 1", *lines(2, 3))
        fixture.receive('RDATA events w unreadable ["x"]')
        answer(fixture)
        fixture.receive('RDATA events w 3 ["y"]')
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3])
        self.assertEqual(fixture.texts()[-1], ("w", 3, ["x", "y"]))

    def test_lost_link(self) -> None:
        """What is parked is fetched if its link is lost, though another one is up."""
        fixture = connected(2)
        other = fixture.connect()
        fixture.receive("POSITION events w 0 0", connection=other)
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 1 1", *lines(2, 3))
        fixture.handler.lost_connection(fixture.connection)
        answer(fixture)
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2])
        self.assertEqual(fixture.host.observer.failures, [])

    def test_writer_is_not_forgotten(self) -> None:
        """A writer is not forgotten while a page is fetched, nor while rows wait."""
        fixture = connected(1)
        receiver = fixture.handler.receivers["events"]
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 1 1")
        receiver.forget_writer("w")
        fixture.receive(*lines(2, 3))
        fixture.receive(*lines(3, 4))
        fixture.host.rows.is_held = True
        answer(fixture)
        fixture.host.rows.release()
        # The sink handles the first of the parked rows.
        receiver.forget_writer("w")
        release(fixture)
        fixture.receive(*lines(4, 5))
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3, 4])

    def test_bound(self) -> None:
        """What exceeds the bound is fetched; what was parked before does not count."""
        fixture = connected(0)
        for _ in range(2):
            for _ in range(2):
                self.check_parked(fixture, OVERFLOW // 2, is_fetched=False)
            self.check_parked(fixture, OVERFLOW, is_fetched=True)

    def test_bound_after_a_rest(self) -> None:
        """The rest of rows, which is parked again, does not count afterwards."""
        fixture = connected(OVERFLOW // 2)
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 1 1")
        fixture.receive("RDATA events w 2 {}", *lines(3, OVERFLOW // 2 + 1))
        answer(fixture)
        self.check_parked(fixture, OVERFLOW, is_fetched=True)

    def check_parked(self, fixture: Receiving, count: int, *, is_fetched: bool) -> None:
        """Park the next rows, and check that they are delivered.

        :param is_fetched: whether they must be fetched for that.
        """
        stream = fixture.stream
        first = stream.current_token("w") + 1
        middle, last = first + count // 2, first + count
        for token in range(first, last + 1):
            stream.persist("w", token, [str(token)])
        stream.is_held = True
        fixture.receive(f"POSITION events w {first} {first}")
        fixture.receive(*lines(first + 1, middle))
        fixture.receive(*lines(middle, last + 1))
        answer(fixture)
        self.assertEqual(("w", first, last) in stream.requests, is_fetched)
        self.assertEqual(fixture.host.rows.tokens("w"), list(range(1, last + 1)))
