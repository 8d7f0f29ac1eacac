"""The faults, by name."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

import attrs

from scripts.tools.faults.attacks import (
    attack_with_bodies,
    attack_with_connections,
    attack_with_far_tokens,
    attack_with_http,
    attack_with_long_names,
    attack_with_relay_storm,
    attack_with_undeclared_writer,
)
from scripts.tools.faults.deployment import (
    FaultDeployment,
    Needs,
    SmallDiskPostgres,
)
from synapse_replication.demo.deployment import wait_until_ready
from synapse_replication.demo.script import STREAMS
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from tests.support.link_proxy import Cut
from tests.support.pooler import PGBOUNCER

#: The minimum and maximum downtime of a process or server, in s.
DOWNTIME = (1.0, 3.0)
#: The duration of a cut link, in s: longer than the heartbeat interval.
CUT = (6.0, 9.0)
#: A duration in s after which a silent link is detected: the timeout is 60 s.
LONG = (62.0, 66.0)
#: The corresponding duration for direct TCP, in s: the timeout is 25 s.
TCP_LONG = (27.0, 30.0)

WRITER_PROXIED = Needs(proxied="event_writer1")
READER_PROXIED = Needs(proxied="reader1")
CLASSIC = Needs(extension=False)
CLASSIC_WRITER_PROXIED = Needs(proxied="event_writer1", extension=False)
TCP = Needs(direct_tcp=True)
TCP_PROXIED = Needs(proxied="reader1", direct_tcp=True)

#: The writer whose tables are moved.
MOVED_WRITER = "event_writer1"
#: The new writer. It writes no stream in memory, whose rows a restart would lose.
SPARE_WRITER = MAIN_INSTANCE

Fault = Callable[[FaultDeployment, random.Random], None]


def _never_skipped() -> str:
    return ""


@attrs.frozen
class Scenario:
    """A fault.

    :ivar name: the name on the command line and in the table.
    :ivar cause: causes the fault and ends it.
    :ivar needs: the requirements for the deployment.
    :ivar why_skipped: returns why the scenario cannot run here; empty if it can.
    """

    name: str
    cause: Fault
    needs: Needs = attrs.field(factory=Needs)
    why_skipped: Callable[[], str] = _never_skipped


def _wait_during_fault(
    chance: random.Random, between: tuple[float, float] = DOWNTIME
) -> None:
    time.sleep(chance.uniform(*between))


def _kill(name: str) -> Fault:
    def cause(deployment: FaultDeployment, chance: random.Random) -> None:
        deployment.kill(name)
        _wait_during_fault(chance)
        deployment.restart(name)

    return cause


def _freeze(name: str, between: tuple[float, float] = CUT) -> Fault:
    def cause(deployment: FaultDeployment, chance: random.Random) -> None:
        process = deployment.processes[name]
        process.freeze()
        try:
            _wait_during_fault(chance, between)
        finally:
            process.thaw()

    return cause


def _move(
    *to: str, kill: bool = False, unsent: bool = False, back: bool = False
) -> Fault:
    """Return a fault that moves the tables of ``event_writer1`` to other writers.

    ``reader1`` is down during the move; ``reader2`` runs with its old configuration.

    :param unsent: whether the writer's last commits are never sent.
    :param back: whether the tables are moved back later.
    """

    def cause(deployment: FaultDeployment, chance: random.Random) -> None:
        deployment.kill("reader1")
        _wait_during_fault(chance)
        if unsent:
            assert deployment.proxy is not None
            deployment.proxy.cut(Cut.PUBLISHES)
            _wait_during_fault(chance)
        _change(deployment, *to, kill=kill)
        deployment.restart("reader1")
        if back:
            _wait_during_fault(chance)
            _change(deployment, MOVED_WRITER, kill=kill)

    return cause


def _change(deployment: FaultDeployment, *to: str, kill: bool) -> None:
    events = STREAMS["events"]
    concerned = set(deployment.writers_of(events))
    end = deployment.kill if kill else deployment.stop
    ended = concerned | set(to)
    for name in sorted(ended):
        end(name)
    if deployment.proxy is not None:
        deployment.proxy.heal()
    deployment.move(MOVED_WRITER, *to)
    started = [deployment.processes[name] for name in sorted(ended)]
    for process in started:
        process.start()
    wait_until_ready(started)


def _kill_redis(deployment: FaultDeployment, chance: random.Random) -> None:
    assert deployment.redis is not None
    deployment.redis.kill()
    _wait_during_fault(chance)
    deployment.redis.start()


def _freeze_redis(between: tuple[float, float]) -> Fault:
    def cause(deployment: FaultDeployment, chance: random.Random) -> None:
        assert deployment.redis is not None
        deployment.redis.freeze()
        try:
            _wait_during_fault(chance, between)
        finally:
            deployment.redis.thaw()

    return cause


def _kill_postgres(deployment: FaultDeployment, chance: random.Random) -> None:
    deployment.postgres.kill()
    _wait_during_fault(chance)
    deployment.postgres.start()


def _cut(what: Cut, between: tuple[float, float]) -> Fault:
    def cause(deployment: FaultDeployment, chance: random.Random) -> None:
        proxy = deployment.proxy
        assert proxy is not None
        proxy.cut(what)
        try:
            _wait_during_fault(chance, between)
        finally:
            proxy.heal()

    return cause


def _lose_commits(deployment: FaultDeployment, chance: random.Random) -> None:
    proxy = deployment.commit_proxy
    assert proxy is not None
    proxy.lose(chance.getrandbits(32))
    try:
        _wait_during_fault(chance, CUT)
    finally:
        proxy.heal()


def _replace(*, early: bool) -> Fault:
    """Return a fault that replaces a frozen writer, which then resumes.

    :param early: whether it resumes while its successor starts.
    """

    def cause(deployment: FaultDeployment, chance: random.Random) -> None:
        replaced = deployment.processes[MOVED_WRITER]
        replaced.freeze()
        deployment.end_sessions(MOVED_WRITER)
        successor = deployment.start_successor(MOVED_WRITER)
        if early:
            # Before that, the resumed process may lock its name again.
            while not deployment.has_locked_name(MOVED_WRITER):
                successor.check()
                time.sleep(0.05)
            time.sleep(chance.uniform(0.0, 1.0))
        else:
            wait_until_ready([successor])
            _wait_during_fault(chance)
        replaced.thaw()
        wait_until_ready([successor])
        deployment.replace(MOVED_WRITER, successor)

    return cause


def _end_sessions(deployment: FaultDeployment, chance: random.Random) -> None:
    """End the sessions of a writer again and again, while a successor waits."""
    successor = deployment.start_successor(MOVED_WRITER)
    while not successor.is_ready():
        successor.check()
        deployment.end_sessions(MOVED_WRITER)
        time.sleep(chance.uniform(0.05, 0.3))
    deployment.replace(MOVED_WRITER, successor)


def _lag(deployment: FaultDeployment, chance: random.Random) -> None:
    """Restart a reader while its database, a standby, lags."""
    deployment.pause_standby()
    try:
        deployment.kill("reader1")
        _wait_during_fault(chance)
        deployment.processes["reader1"].start()
        _wait_during_fault(chance, CUT)
    finally:
        deployment.resume_standby()
    wait_until_ready([deployment.processes["reader1"]])


def _promote(deployment: FaultDeployment, chance: random.Random) -> None:
    deployment.promote_standby()
    _wait_during_fault(chance)


def _why_no_pooler() -> str:
    return "" if PGBOUNCER else "PgBouncer is not installed"


def _fill_disk(deployment: FaultDeployment, chance: random.Random) -> None:
    postgres = deployment.postgres
    assert isinstance(postgres, SmallDiskPostgres)
    postgres.fill_disk()
    try:
        _wait_during_fault(chance, CUT)
    finally:
        postgres.free_disk()


def _why_no_disk() -> str:
    if not sys.platform.startswith("linux"):
        return "a small disk is mounted on Linux only"
    return "" if os.geteuid() == 0 else "only root may mount a small disk"


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("main-killed", _kill(MAIN_INSTANCE)),
        Scenario("writer-killed", _kill("event_writer1")),
        Scenario("reader-killed", _kill("reader1")),
        Scenario("writer-moved", _move(SPARE_WRITER)),
        Scenario(
            "writer-killed-then-moved",
            _move(SPARE_WRITER, kill=True, unsent=True),
            WRITER_PROXIED,
        ),
        Scenario("writer-moved-back", _move(SPARE_WRITER, kill=True, back=True)),
        Scenario("writer-added", _move(MOVED_WRITER, SPARE_WRITER)),
        Scenario("writer-removed", _move("event_writer2", kill=True)),
        Scenario("writer-frozen", _freeze("event_writer1")),
        Scenario("reader-frozen", _freeze("reader1")),
        Scenario("redis-killed", _kill_redis),
        Scenario("redis-frozen", _freeze_redis(CUT)),
        Scenario("redis-frozen-long", _freeze_redis(LONG)),
        Scenario("postgres-killed", _kill_postgres),
        Scenario("publishes-cut", _cut(Cut.PUBLISHES, CUT), WRITER_PROXIED),
        Scenario("publishes-cut-long", _cut(Cut.PUBLISHES, LONG), WRITER_PROXIED),
        Scenario("replies-cut", _cut(Cut.REPLIES, CUT), WRITER_PROXIED),
        Scenario("subscription-cut", _cut(Cut.SUBSCRIPTION, CUT), READER_PROXIED),
        Scenario("subscription-cut-long", _cut(Cut.SUBSCRIPTION, LONG), READER_PROXIED),
        Scenario("pings-cut-long", _cut(Cut.PINGS, LONG), READER_PROXIED),
        Scenario("classic-redis-killed", _kill_redis, CLASSIC),
        Scenario(
            "classic-publishes-cut", _cut(Cut.PUBLISHES, CUT), CLASSIC_WRITER_PROXIED
        ),
        Scenario(
            "classic-writer-killed-then-moved",
            _move(SPARE_WRITER, kill=True, unsent=True),
            CLASSIC_WRITER_PROXIED,
        ),
        Scenario("tcp-writer-moved", _move(SPARE_WRITER), TCP),
        Scenario("tcp-main-killed", _kill(MAIN_INSTANCE), TCP),
        Scenario("tcp-writer-killed", _kill("event_writer1"), TCP),
        Scenario("tcp-reader-killed", _kill("reader1"), TCP),
        Scenario("tcp-writer-frozen", _freeze("event_writer1", TCP_LONG), TCP),
        Scenario("tcp-reader-frozen", _freeze("reader1"), TCP),
        Scenario("tcp-reader-frozen-long", _freeze("reader1", TCP_LONG), TCP),
        Scenario("tcp-rows-cut", _cut(Cut.REPLIES, CUT), TCP_PROXIED),
        Scenario("tcp-rows-cut-long", _cut(Cut.REPLIES, TCP_LONG), TCP_PROXIED),
        Scenario("tcp-pings-cut-long", _cut(Cut.PUBLISHES, TCP_LONG), TCP_PROXIED),
        Scenario("hostile-far-token", attack_with_far_tokens),
        Scenario("hostile-undeclared-writer", attack_with_undeclared_writer),
        Scenario("hostile-long-names", attack_with_long_names),
        Scenario("hostile-bodies", attack_with_bodies),
        Scenario("tcp-hostile-relay-storm", attack_with_relay_storm, TCP),
        Scenario("tcp-hostile-long-names", attack_with_long_names, TCP),
        Scenario("tcp-hostile-connections", attack_with_connections, TCP),
        Scenario("tcp-hostile-http", attack_with_http, TCP),
        Scenario("commits-lost", _lose_commits, Needs(commits_proxied="event_writer1")),
        Scenario(
            "classic-commits-lost",
            _lose_commits,
            Needs(commits_proxied="event_writer1", extension=False),
        ),
        Scenario(
            "tcp-commits-lost",
            _lose_commits,
            Needs(commits_proxied="event_writer1", direct_tcp=True),
        ),
        Scenario("writer-replaced", _replace(early=False)),
        Scenario("writer-replaced-early", _replace(early=True)),
        Scenario("classic-writer-replaced", _replace(early=False), CLASSIC),
        Scenario("writer-sessions-ended", _end_sessions),
        Scenario("standby-lags", _lag, Needs(read_standby="reader1")),
        Scenario(
            "classic-standby-lags",
            _lag,
            Needs(read_standby="reader1", extension=False),
        ),
        Scenario("promoted-synchronous", _promote, Needs(failover="synchronous")),
        Scenario("promoted-asynchronous", _promote, Needs(failover="asynchronous")),
        Scenario(
            "pooled-sessions-writer-killed",
            _kill("event_writer1"),
            Needs(pooler="session"),
            _why_no_pooler,
        ),
        Scenario(
            "pooled-transactions-writer-killed",
            _kill("event_writer1"),
            Needs(pooler="transaction"),
            _why_no_pooler,
        ),
        Scenario("disk-full", _fill_disk, Needs(small_disk=True), _why_no_disk),
    )
}
