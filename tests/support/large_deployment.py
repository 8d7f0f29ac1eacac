"""The status of one process among two hundred others, of which forty write."""

from __future__ import annotations

from attrs import evolve
from twisted.internet.task import Clock

from synapse_replication.handlers.events import (
    CatchUpEvent,
    CatchUpPage,
    PeerHeartbeat,
    PeerSilent,
)
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from tests.support.known_readers import KnownReaders

STREAMS = (
    "account_data",
    "device_lists",
    "events",
    "presence",
    "push_rules",
    "receipts",
    "thread_subscriptions",
    "to_device",
    "typing",
    "un_partial_stated_rooms",
)
WRITERS = tuple(f"stream_writer{number}" for number in range(1, 41))
READERS = tuple(f"generic_worker{number}" for number in range(1, 161))


def make_large_deployment(clock: Clock) -> StatusObserver:
    """Return a status in which rows have arrived for five minutes.

    One writer is stalled, because it was stopped; the rows of another are being
    fetched; two readers were killed.

    :param clock: advanced by the function.
    """
    pairs = [(stream, writer) for stream in STREAMS for writer in WRITERS]
    observer = StatusObserver(
        "example.com", "generic_worker200", pairs, monotonic=clock.seconds
    )
    known = KnownReaders(observer)
    known.link_up()
    for number, (stream, writer) in enumerate(pairs):
        known.go_live(stream, writer, 120_000 + 97 * number)
    heartbeats = {
        name: PeerHeartbeat(
            name,
            f"Vn3xk{number}",
            "0.2.0",
            f"host{number % 20}:{4000 + number}",
            False,
            {},
            every=400,
        )
        for number, name in enumerate((*WRITERS, *READERS))
    }
    for heartbeat in heartbeats.values():
        observer.observe(heartbeat)
    for step in range(60):
        clock.advance(5)
        known.announce("events", "stream_writer7", 160_000 + 400 * (step % 7))
        observer.sample()
    observer.observe(evolve(heartbeats["stream_writer33"], is_leaving=True))
    clock.advance(20)
    for name in ("generic_worker150", "generic_worker151"):
        observer.observe(PeerSilent(name, heartbeats[name].epoch, 20))
    observer.observe(heartbeats["generic_worker1"])
    event = CatchUpEvent("events", "stream_writer7", 150_000, 188_211)
    known.fetch(event)
    observer.observe(CatchUpPage(event, 12_034, 162_034))
    return observer
