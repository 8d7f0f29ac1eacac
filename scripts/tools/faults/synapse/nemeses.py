"""The faults, by name."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial

import attrs

from scripts.tools.faults.scenarios import CUT, DOWNTIME
from scripts.tools.faults.synapse.cluster import Cluster
from scripts.tools.faults.synapse.deployments import (
    PERSISTER,
    PROCESSES,
    READER,
    WRITER,
)
from scripts.tools.faults.synapse.evidence import Evidence
from scripts.tools.faults.synapse.schedule import MIXED
from scripts.tools.faults.synapse.traffic import Room, Traffic
from synapse_replication.errors import ReplicationError
from tests.support.client_api import ApiError
from tests.support.link_proxy import Cut
from tests.support.synapse_process import MAIN

#: The downtime of Redis for *redis-away*, in s.
LONG_DOWNTIME = (8.0, 8.0)
#: The duration of a fault that ends as soon as it is caused.
INSTANT = (0.0, 0.0)
#: How long to wait for rows to arrive, in s: at all processes, before a row is withheld
#: from the reader; then at the other processes, for the withheld row.
SETTLE = 15.0
#: The share of the commits of rows whose answers are lost.
LOST = 0.5
#: How long a replaced process may run on, in s.
RUNS_ON = 15.0
#: The streams with a fault that makes the reader miss exactly one row.
MISSED = ("events", "receipts", "to_device", "caches", "typing")


@attrs.frozen
class Scene:
    """The environment of a fault.

    :ivar chance: the random generator of the fault.
    :ivar victims: the processes that the faults kill, freeze or disconnect.
    """

    cluster: Cluster
    traffic: Traffic
    evidence: Evidence
    chance: random.Random
    victims: set[str] = attrs.Factory(set)

    def choose_victim(self) -> str:
        """Return the name of a process that no other fault has killed."""
        running = [name for name in PROCESSES if self.cluster.process(name).is_running]
        name = self.chance.choice(running)
        self.victims.add(name)
        return name


Fault = Callable[[Scene], AbstractContextManager[None]]


@attrs.frozen
class Nemesis:
    """A fault.

    :ivar fault: returns a context that causes the fault and ends it.
    :ivar hold: the minimum and maximum duration of the fault, in s.
    :ivar is_quiet: whether there are no background writes during the fault.
    :ivar ends_last: whether the fault ends after overlapping faults, because its end
        needs the servers.
    """

    fault: Fault
    hold: tuple[float, float] = DOWNTIME
    is_quiet: bool = False
    ends_last: bool = False


@contextlib.contextmanager
def _pause(scene: Scene) -> Iterator[None]:
    process = scene.cluster.process(scene.choose_victim())
    process.freeze()
    try:
        yield
    finally:
        # Another fault may have killed the process.
        if process.is_running:
            process.thaw()


@contextlib.contextmanager
def _kill(name: str, scene: Scene) -> Iterator[None]:
    scene.victims.add(name)
    scene.cluster.process(name).kill()
    try:
        yield
    finally:
        scene.cluster.start_process(name)


@contextlib.contextmanager
def _cut(what: Cut, scene: Scene) -> Iterator[None]:
    proxy = scene.cluster.proxies[scene.choose_victim()]
    proxy.cut(what)
    try:
        yield
    finally:
        proxy.heal()


@contextlib.contextmanager
def _redis_away(scene: Scene) -> Iterator[None]:
    scene.cluster.redis.kill()
    try:
        yield
    finally:
        scene.cluster.redis.start()


@contextlib.contextmanager
def _redis_restart(scene: Scene) -> Iterator[None]:
    scene.cluster.redis.restart()
    yield


@contextlib.contextmanager
def _redis_kill(scene: Scene) -> Iterator[None]:
    scene.cluster.redis.kill()
    scene.cluster.redis.start()
    yield


@contextlib.contextmanager
def _postgres_restart(scene: Scene) -> Iterator[None]:
    scene.cluster.postgres.restart()
    yield


@contextlib.contextmanager
def _client_kill(scene: Scene) -> Iterator[None]:
    # Kill all subscriptions, or all connections that are not subscriptions. SKIPME
    # spares the connection of this command.
    kind = scene.chance.choice(("pubsub", "normal"))
    scene.cluster.redis.command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
    yield


@contextlib.contextmanager
def _lose_commits(name: str, table: str, scene: Scene) -> Iterator[None]:
    """Lose half of the answers to commits of a process; some arrive up to 2 s later.

    :param table: only to commits of rows of this table.
    """
    scene.victims.add(name)
    proxy = scene.cluster.commit_proxies[name]
    proxy.lose(scene.chance.getrandbits(32), LOST, table)
    try:
        yield
    finally:
        proxy.heal()


@contextlib.contextmanager
def _replace(name: str, table: str, scene: Scene) -> Iterator[None]:
    """Replace a process that is frozen in a transaction, and let it go on.

    Its sessions end, as those of a suspended machine do, before its successor starts.

    :param table: the table to which the transaction writes.
    """
    scene.victims.add(name)
    cluster = scene.cluster
    replaced = cluster.process(name)
    with cluster.held_write(name, table):
        replaced.freeze()
        cluster.end_sessions(name)
    cluster.replace_process(name)
    replaced.thaw()
    yield
    deadline = time.monotonic() + RUNS_ON
    while replaced.is_running and time.monotonic() < deadline:
        time.sleep(0.1)
    was_running = replaced.is_running
    replaced.kill()
    if was_running and cluster.is_ours(name):
        raise ReplicationError(f"{name} runs on, although it was replaced")


@contextlib.contextmanager
def _miss_one(stream: str, scene: Scene) -> Iterator[None]:
    """Make the reader miss exactly one row of a stream.

    The reader is frozen and its subscription cut; one row is written; when the other
    processes have it, the subscription is closed and the reader continues.
    """
    room = _random_room(stream, scene)
    _retry(lambda: room.prepare(stream))
    _settle(scene, PROCESSES)
    scene.victims.add(READER)
    reader = scene.cluster.process(READER)
    proxy = scene.cluster.proxies[READER]
    reader.freeze()
    try:
        proxy.cut(Cut.SUBSCRIPTION)
        _retry(lambda: room.write(stream))
        _settle(scene, [name for name in PROCESSES if name != READER])
    finally:
        proxy.heal()
        reader.thaw()
    yield


@contextlib.contextmanager
def _failed_read(scene: Scene) -> Iterator[None]:
    """Restart PostgreSQL while nothing is written, then write one receipt.

    The first transaction of each old connection fails, and the one that reads the
    receipt for a waiting user may be such a transaction.
    """
    room = _random_room("receipts", scene)
    _retry(lambda: room.prepare("receipts"))
    _settle(scene, PROCESSES)
    scene.cluster.postgres.restart()
    _retry(lambda: room.write("receipts"))
    yield


def _retry(request: Callable[[], None]) -> None:
    """Repeat a request until it succeeds: a process may first need new connections."""
    deadline = time.monotonic() + SETTLE
    while time.monotonic() < deadline:
        with contextlib.suppress(ApiError, OSError):
            request()
            return
        time.sleep(0.1)


def _random_room(stream: str, scene: Scene) -> Room:
    # Choose a persister first: one may have many more rooms than the other.
    rooms = scene.traffic.rooms
    persister = scene.chance.choice(sorted({room.persister for room in rooms}))
    return scene.chance.choice([room for room in rooms if room.persister == persister])


def _settle(scene: Scene, names: list[str] | tuple[str, ...]) -> None:
    """Wait until processes have all written rows, for at most :data:`SETTLE` s."""
    deadline = time.monotonic() + SETTLE
    until = time.time()
    while time.monotonic() < deadline:
        answered = scene.evidence.collect()
        behind = {epoch.process for epoch, _ in scene.evidence.new_missing(until)}
        if answered and not behind & set(names):
            return
        time.sleep(0.1)


NEMESES: Mapping[str, Nemesis] = {
    "pause": Nemesis(_pause, (2.0, 5.0)),
    "cut-subscription": Nemesis(partial(_cut, Cut.SUBSCRIPTION), CUT),
    "cut-publishing": Nemesis(partial(_cut, Cut.PUBLISHES), CUT),
    "redis-restart": Nemesis(_redis_restart, INSTANT),
    "redis-kill": Nemesis(_redis_kill, INSTANT),
    "redis-away": Nemesis(_redis_away, LONG_DOWNTIME),
    "postgres-restart": Nemesis(_postgres_restart, INSTANT),
    "client-kill": Nemesis(_client_kill, INSTANT),
    **{
        f"kill-{name}": Nemesis(partial(_kill, name), ends_last=True)
        for name in (MAIN, "persister1", "persister2", WRITER)
    },
    **{
        f"miss-one-{stream}": Nemesis(
            partial(_miss_one, stream), INSTANT, is_quiet=True
        )
        for stream in MISSED
    },
    f"commits-lost-{PERSISTER}": Nemesis(
        partial(_lose_commits, PERSISTER, "events"), CUT
    ),
    f"commits-lost-{WRITER}": Nemesis(
        partial(_lose_commits, WRITER, "device_inbox"), CUT
    ),
    f"replace-{PERSISTER}": Nemesis(partial(_replace, PERSISTER, "events")),
    f"replace-{WRITER}": Nemesis(partial(_replace, WRITER, "device_inbox")),
    "failed-read": Nemesis(_failed_read, INSTANT, is_quiet=True),
}

#: The faults that may overlap others.
MIXABLE = tuple(
    name
    for name, nemesis in NEMESES.items()
    if not nemesis.is_quiet and not name.startswith("replace-")
)

#: The faults that show limits, of the homeserver or of streams held in memory; they are
#: not in a full run.
ON_DEMAND = ("failed-read", f"replace-{WRITER}")

#: All names that can be selected, and those of a full run.
NAMES = (*NEMESES, MIXED)
FULL_RUN = tuple(name for name in NAMES if name not in ON_DEMAND)


def cause(names: tuple[str, ...], scene: Scene) -> None:
    """Cause faults that overlap, hold them, and end them."""
    nemeses = sorted(
        (NEMESES[name] for name in names), key=lambda nemesis: not nemesis.ends_last
    )
    hold = max(scene.chance.uniform(*nemesis.hold) for nemesis in nemeses)
    with contextlib.ExitStack() as stack:
        # The contexts end in the reverse order.
        for nemesis in nemeses:
            stack.enter_context(nemesis.fault(scene))
            if len(nemeses) > 1:
                time.sleep(scene.chance.random())
        time.sleep(hold)
