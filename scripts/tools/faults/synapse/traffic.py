"""Users who write to every stream, and users who check the responses of ``/sync``."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Hashable, Iterator
from typing import Protocol

import attrs

from scripts.tools.faults.synapse.cluster import Cluster
from scripts.tools.faults.synapse.deployments import READER, WRITER
from scripts.tools.faults.synapse.expectations import Expectations, shown_in
from tests.support.client_api import ApiError, ApiUser, ClientApi
from tests.support.synapse_process import MAIN

#: The minimum and maximum number of rooms. The random id of a room determines its
#: persister.
LEAST_ROOMS, MOST_ROOMS = 4, 20

#: The timeout in s of a ``/sync`` request, normally and for eager users. With the
#: shorter timeout, a request begins every 20 ms, so that some begin just as a fault
#: ends.
LONG_POLL, EAGER_POLL = 2.0, 0.02
#: The minimum and maximum time between two requests of a writing user, in s.
REQUEST_PAUSE = (0.2, 0.5)
#: The delay in s after a failed request.
PAUSE_AFTER_FAILURE = 0.3


class Listeners(Protocol):
    """The client APIs of all processes."""

    def api(self, name: str) -> ClientApi:
        """Return the client API of a process."""
        ...


@attrs.define(eq=False)
class Room:
    """A room in which one user writes and another watches.

    :ivar alice: the user who writes, through the main process unless another is needed.
    :ivar bob: the user who watches, on the reader.
    :ivar persister: the process that persists its events.
    """

    number: int
    alice: ApiUser
    bob: ApiUser
    room_id: str
    cluster: Listeners
    expectations: Expectations
    persister: str = ""
    _numbers: Iterator[int] = attrs.Factory(itertools.count)
    _last_event: str = ""
    _is_typing: bool = False

    def prepare(self, stream: str) -> None:
        """Establish the state that :meth:`write` needs to write a row of a stream."""
        if stream == "receipts":
            self.write("events")
        elif stream == "typing":
            self._set_typing(True)
            self._set_typing(False)

    def write(self, stream: str) -> None:
        """Write one row of a stream.

        :raises OSError: if the process cannot be reached.
        :raises ApiError: if it rejects the request.
        """
        getattr(self, f"_write_{stream}")(f"{self.number}-{next(self._numbers)}")

    def _write_events(self, text: str) -> None:
        # Do not retry: a second request would send another message.
        self._last_event = self.alice.send_message(self.room_id, text)
        self.expectations.promise("events", text)

    def _write_receipts(self, text: str) -> None:
        event_id = self._last_event
        if event_id:
            key = (self.room_id, self.alice.user_id)
            with self._replacing("receipts", key):
                self._on_writer(self.alice).read_up_to(self.room_id, event_id)
            self.expectations.promise("receipts", key, event_id)

    def _write_to_device(self, text: str) -> None:
        self._on_writer(self.alice).send_to_device(self.bob, text)
        self.expectations.promise("to_device", text)

    def _write_typing(self, text: str) -> None:
        shown = (self.alice.user_id,)
        # The same value may already have been shown earlier.
        self.expectations.forget("typing", self.room_id, shown)
        with self._replacing("typing", self.room_id):
            self._set_typing(True)
        self.expectations.promise("typing", self.room_id, shown)

    def _write_fleeting(self, text: str) -> None:
        # Typing times out by itself, perhaps unseen: promise nothing.
        self._set_typing(not self._is_typing)

    def _set_typing(self, is_typing: bool) -> None:
        self._is_typing = is_typing
        self._on_writer(self.alice).set_typing(self.room_id, is_typing)

    def _write_account_data(self, text: str) -> None:
        bob = self.bob.at(self.cluster.api(MAIN))
        number = next(self._numbers)
        kind = f"org.example.{self.number}"
        with self._replacing("account_data", kind):
            bob.set_account_data(kind, {"number": number})
        self.expectations.promise("account_data", kind, number)

    def _write_caches(self, text: str) -> None:
        self.alice.upload_device_keys()

    def _write_tags(self, text: str) -> None:
        self.alice.set_room_tag(self.room_id, "u.tag")

    def _write_push_rules(self, text: str) -> None:
        self.alice.set_push_rule(f"word{text}")

    def _write_presence(self, text: str) -> None:
        self.alice.set_presence("online", text)

    def _write_names(self, text: str) -> None:
        self.alice.set_display_name(f"Alice {text}")

    @contextlib.contextmanager
    def _replacing(self, stream: str, key: Hashable) -> Iterator[None]:
        """Make a request whose row replaces the last row for a key.

        If the request fails, its row may still have been written: neither of the two
        rows is then expected.
        """
        try:
            yield
        except (ApiError, OSError):
            self.expectations.withdraw(stream, key)
            raise

    def _on_writer(self, user: ApiUser) -> ApiUser:
        return user.at(self.cluster.api(WRITER))


#: The streams to write, with their relative frequencies.
WEIGHTS = {
    "events": 40,
    "receipts": 12,
    "to_device": 14,
    "fleeting": 6,
    "account_data": 8,
    "caches": 6,
    "tags": 4,
    "push_rules": 2,
    "presence": 5,
    "names": 3,
}


class Traffic:
    """Rooms, each with a watching thread; the first ones also have a writing thread.

    :param cluster: a running cluster.
    :ivar requests: the number of requests in the background.
    :ivar failures: the number of failed requests, which are expected during faults.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.expectations = Expectations()
        self.rooms: list[Room] = []
        self._long_poll = LONG_POLL
        self.requests = 0
        self.failures = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def make_rooms(self) -> None:
        """Register users and create rooms, until each persister has one."""
        while len(self.rooms) < MOST_ROOMS:
            self.rooms.append(self._make_room(len(self.rooms)))
            persisters = {room.persister for room in self.rooms}
            if len(self.rooms) >= LEAST_ROOMS and len(persisters) > 1:
                return

    def _make_room(self, number: int) -> Room:
        register = self._cluster.deployment.register
        alice, bob = register(f"alice{number}"), register(f"bob{number}")
        room_id = alice.create_room(bob)
        bob.join(room_id)
        ((persister,),) = self._cluster.query(
            "SELECT instance_name FROM events WHERE room_id = %s LIMIT 1", room_id
        )
        watcher = bob.at(self._cluster.api(READER))
        return Room(
            number,
            alice,
            watcher,
            room_id,
            self._cluster,
            self.expectations,
            persister=persister,
        )

    # -- threads ------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads that watch the rooms."""
        for room in self.rooms:
            thread = threading.Thread(target=self._watch, args=(room,), daemon=True)
            thread.start()
            self._threads.append(thread)

    @contextlib.contextmanager
    def writing(self, seed: int) -> Iterator[None]:
        """Write in the background; at the end of the context no request is in progress.

        :param seed: determines the writes and their times.
        """
        enough = threading.Event()
        threads = [
            threading.Thread(target=self._write, args=(room, enough, seed), daemon=True)
            for room in self.rooms[:LEAST_ROOMS]
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            enough.set()
            for thread in threads:
                thread.join()

    @contextlib.contextmanager
    def eager_users(self) -> Iterator[None]:
        """Let users poll ``/sync`` rapidly within the context."""
        self._long_poll = EAGER_POLL
        try:
            yield
        finally:
            self._long_poll = LONG_POLL

    def stop(self) -> None:
        """End all threads."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _write(self, room: Room, enough: threading.Event, seed: int) -> None:
        chance = random.Random(f"{seed} {room.number}")
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        while not enough.wait(chance.uniform(*REQUEST_PAUSE)):
            (kind,) = chance.choices(kinds, weights)
            try:
                room.write(kind)
            except (ApiError, OSError):
                with self._lock:
                    self.failures += 1
                enough.wait(PAUSE_AFTER_FAILURE)
            with self._lock:
                self.requests += 1

    def _watch(self, room: Room) -> None:
        since = None
        while not self._ended.is_set():
            try:
                answer = room.bob.sync(since, timeout_ms=int(1000 * self._long_poll))
            except (ApiError, OSError):
                self._ended.wait(PAUSE_AFTER_FAILURE)
                continue
            since = answer["next_batch"]
            for stream, key, value in shown_in(answer):
                self.expectations.see(stream, key, value)
