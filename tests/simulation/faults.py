"""A plan of faults, derived from a seed.

A fault occurs at a random time, or at a *point*: the next time that a process reaches
a certain step (after ``nextval``, before or after a commit, before it publishes rows,
between the rows of a batch).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from random import Random

from tests.simulation.cluster import Cluster
from tests.simulation.liar import Liar
from tests.simulation.network import Connection, Pipe
from tests.simulation.topology import MEMORY_STREAM, PROCESSES

_WRITERS = ("main", "writer1", "writer2")
_POINTS = (
    "get_next_ids",
    "before commit",
    "after commit",
    "before publish",
    "between rows",
)
_RDATA = re.compile(rb"RDATA (\S+) (\S+) (\S+) ")


class Faults:
    """Causes the faults of a plan, and ends them.

    :param cluster: the cluster.
    :param seed: determines the plan.
    :param start: the time in s at which faults may begin.
    :param until: the time in s at which :meth:`end` is called.
    :ivar ended: whether :meth:`end` was called.
    """

    def __init__(self, cluster: Cluster, seed: int, start: float, until: float) -> None:
        self._cluster = cluster
        self._random = random = Random(f"{seed}/faults")
        self._until = until
        self._garble_chance = 0.0
        self._armed: dict[tuple[str, str], Callable[[], object]] = {}
        #: The (subscriber, stream, writer) triples for which a row's token was made
        #: unreadable. A triple is removed when the subscriber is sent an intact later
        #: row that ends a batch.
        self.unread: dict[tuple[str, str, str], bool] = {}
        self.ended = False
        #: The writers that discard their rows now; and for each (stream, writer) with
        #: an unfinished batch, whether the batch is discarded.
        self._discarding: set[str] = set()
        self._batches: dict[tuple[str, str], bool] = {}
        # Use a separate random generator, so that lies do not change the other faults.
        self._lies = Random(f"{seed}/liar")
        self.liar = Liar(cluster, self._lies)
        cluster.broker.delivers = self._deliver
        if cluster.discards:
            cluster.broker.discards = self._discards
        cluster.database.point = self._reach
        cluster.network.before_write = self._before_write
        cluster.database.retry_chance = random.choice([0.0, 0.05])
        cluster.slow_sink_chance = random.choice([0.0, 0.1])
        self._schedule(start)

    def _schedule(self, start: float) -> None:
        cluster, random, lies = self._cluster, self._random, self._lies
        kinds: list[Callable[[], str]] = [
            self._crash,
            self._crash,
            self._crash_at_point,
            self._crash_at_point,
            self._outrun,
            self._cut_at_point,
            self._reset,
            self._reset,
            self._cut_outbound,
            self._cut_outbound,
            self._half_open,
            self._restart_broker,
            self._stall_auth,
            self._fail_auth,
            self._storm,
            self._storm,
            self._interleave,
            self._interleave,
            self._stop_database,
            self._slow_database,
            self._lose_answers,
            self._garble,
            self._fail_sinks,
            self._fail_http,
        ]
        if cluster.standby is not None:
            kinds += [self._lag] * 6
        if cluster.replaces:
            kinds += [self._replace] * 12
        for _ in range(random.randrange(2, 14)):
            kind = random.choice(kinds)
            at = start + random.random() * (self._until - start)
            cluster.clock.callLater(at, self._begin, kind)
        if cluster.discards:
            for _ in range(lies.choice([1, 2, 6])):
                at = start + lies.random() * (self._until - start)
                cluster.clock.callLater(at, self._begin, self._discard)
            cluster.clock.callLater(self._until, self.end)
            return
        for _ in range(lies.choice([0, 0, 1, 2, 6])):
            at = start + lies.random() * (self._until - start)
            cluster.clock.callLater(at, self._begin, self.liar.lie)
        cluster.clock.callLater(self._until, self.end)

    def _begin(self, kind: Callable[[], str]) -> None:
        what = kind()
        name = kind.__name__.strip("_")
        self._cluster.counts.faults[name] += 1
        self._cluster.trace(f"FAULT {name}: {what}")

    def _later(self, func: Callable[..., object], *args: object) -> float:
        delay = 0.3 + self._random.random() * 4
        self._cluster.clock.callLater(delay, func, *args)
        return delay

    def end(self) -> None:
        """End the faults, and start the servers and processes that are down.

        Half-open connections remain until the processes detect them; sinks remain slow.
        """
        cluster = self._cluster
        cluster.trace("the faults are over")
        self.ended = True
        self._garble_chance = 0.0
        self._armed.clear()
        self._discarding.clear()
        cluster.database.retry_chance = cluster.database.lost_answer_chance = 0.0
        cluster.sink_failure_chance = cluster.http_failure_chance = 0.0
        cluster.network.slowness.clear()
        cluster.network.refused.clear()
        self._end_interleaving()
        cluster.broker.auth_stalls = cluster.broker.auth_fails = False
        cluster.database.slowness = 1.0
        self._set_lag(0.05)
        for process in list(cluster.replaced):
            cluster.resume(process)
        if not cluster.database.is_up:
            cluster.database.start()
        if not cluster.network.broker_is_up:
            cluster.broker.start()
        for name in PROCESSES:
            cluster.start(name)

    # -- kinds of faults: a method that returns a string causes and describes a fault --

    def _crash(self) -> str:
        name = self._random.choice(list(PROCESSES))
        self._crash_now(name)
        return name

    def _crash_now(self, name: str) -> None:
        self._cluster.crash(name)
        self._cluster.clock.callLater(
            self._random.random() * 4, self._cluster.start, name
        )

    def _replace(self) -> str:
        """Suspend a writer, start its successor, and let it write when it resumes."""
        cluster, random = self._cluster, self._random
        name = random.choice(_WRITERS)
        process = cluster.replace(name)
        if process is None:
            return f"{name} is not up"
        begins, resumes = random.random() * 2, random.random() * 6
        cluster.clock.callLater(begins, cluster.start, name)
        # It has read the rows that it writes before it was suspended.
        writes = [
            partial(process.write, stream, cluster.make_rows(process, stream, 2))
            for stream, writers in cluster.writers.items()
            if name in writers
        ]

        def resume() -> None:
            cluster.resume(process)
            for write in writes:
                if process in cluster.replaced:
                    cluster.run("writing in a replaced process", write())

        cluster.clock.callLater(resumes, resume)
        return f"{name} for {resumes:.1f} s, its successor starts after {begins:.1f} s"

    def _crash_at_point(self) -> str:
        name, point = self._random.choice(_WRITERS), self._random.choice(_POINTS)
        self._armed[point, name] = lambda: self._crash_now(name)
        return f"{name}, {point}"

    @property
    def _sending_role(self) -> str:
        """The role of the connections on which rows are sent first."""
        return "redis_out" if self._cluster.links.has_redis else "tcp"

    def _outrun(self) -> str:
        """Restart the writer of the stream in memory while a reader is down or cut off.

        The new tokens of the writer may then exceed the reader's position.
        """
        cluster, random = self._cluster, self._random
        call_later = cluster.clock.callLater
        name = random.choice([name for name in PROCESSES if name != "main"])
        is_crash = random.random() < 0.7
        if is_crash:
            cluster.crash(name)
            call_later(4.0, cluster.start, name)
        else:
            for receiving in sorted({"redis", "tcp"} & set(cluster.links.roles)):
                role = name, receiving
                cluster.network.refused.add(role)
                self._reset_all(*role)
                call_later(4.0, cluster.network.refused.discard, role)
        cluster.crash("main")
        call_later(1.0 + random.random() / 2, cluster.start, "main")
        for _ in range(random.randrange(5, 40)):
            call_later(2.5 + random.random(), self._write_in_memory)
        return f"{name}, which {'crashes' if is_crash else 'receives nothing'}"

    def _write_in_memory(self) -> None:
        if not self.ended:
            self._cluster.write("main", MEMORY_STREAM, 1)

    def _cut_at_point(self) -> str:
        name, point = self._random.choice(_WRITERS), self._random.choice(_POINTS)
        role = self._sending_role
        self._armed[point, name] = lambda: self._reset_all(name, role)
        return f"{name}, {point}"

    def _reset_all(self, name: str, role: str | None) -> None:
        for connection in self._cluster.network.of_process(name, role):
            connection.reset(in_flight_arrives=self._random.random() < 0.5)

    def _reset(self) -> str:
        name = self._random.choice(list(PROCESSES))
        role = self._random.choice([None, *self._cluster.links.roles])
        self._reset_all(name, role)
        return f"{name}, {role or 'both'}"

    def _cut_outbound(self) -> str:
        name = self._random.choice(_WRITERS)
        refused, role = self._cluster.network.refused, self._sending_role
        refused.add((name, role))
        self._reset_all(name, role)
        delay = self._later(refused.discard, (name, role))
        return f"{name} for {delay:.1f} s"

    def _half_open(self) -> str:
        name = self._random.choice(list(PROCESSES))
        role = self._random.choice(self._cluster.links.roles)
        direction = self._random.choice(["up", "down", "both"])
        for connection in self._cluster.network.of_process(name, role):
            connection.up.is_cut |= direction in ("up", "both")
            connection.down.is_cut |= direction in ("down", "both")
        return f"{name}, {role}, {direction}"

    def _restart_broker(self) -> str:
        cluster = self._cluster
        if not cluster.network.broker_is_up:
            return "already down"
        cluster.broker.stop()
        return f"for {self._later(self._start_broker):.1f} s"

    def _start_broker(self) -> None:
        if not self._cluster.network.broker_is_up:
            self._cluster.broker.start()

    def _stall_auth(self) -> str:
        broker = self._cluster.broker
        broker.auth_stalls = True
        self._reset()
        return f"for {self._later(setattr, broker, 'auth_stalls', False):.1f} s"

    def _fail_auth(self) -> str:
        broker = self._cluster.broker
        broker.auth_fails = True
        self._reset()
        return f"for {self._later(setattr, broker, 'auth_fails', False):.1f} s"

    def _storm(self) -> str:
        slowness = self._cluster.network.slowness
        name = self._random.choice(list(PROCESSES))
        slowness[name] = self._random.choice([10.0, 50.0, 200.0])
        delay = self._later(slowness.pop, name, None)
        return f"{name} for {delay:.1f} s"

    def _interleave(self) -> str:
        """Deliver batches in pieces, interleaved with batches of other writers."""
        self._cluster.network.splitting.chance = 0.9
        self._cluster.network.splitting.seconds = 0.1
        return f"for {self._later(self._end_interleaving):.1f} s"

    def _end_interleaving(self) -> None:
        self._cluster.network.splitting.chance = 0.1
        self._cluster.network.splitting.seconds = 0.002

    def _stop_database(self) -> str:
        database = self._cluster.database
        if not database.is_up:
            return "already down"
        database.stop()
        behind = self._random.choice([0, 0, 32])
        seconds = self._later(self._start_database, behind)
        return f"for {seconds:.1f} s; the sequences lose {behind} ids"

    def _start_database(self, behind: int) -> None:
        if not self._cluster.database.is_up:
            self._cluster.database.fall_behind(behind)
            if behind:
                # The sequences may now be below announced positions. Such a position is
                # true, but a process cannot distinguish it from a false one.
                self._cluster.ledger.doubt_all()
            self._cluster.database.start()

    def _slow_database(self) -> str:
        database = self._cluster.database
        database.slowness = self._random.choice([5.0, 30.0])
        return f"for {self._later(setattr, database, 'slowness', 1.0):.1f} s"

    def _lag(self) -> str:
        """Let the standby lag behind, and its reader miss rows meanwhile."""
        lag = self._random.choice([0.5, 3.0, 8.0])
        self._set_lag(lag)
        self._cluster.crash("reader2")
        self._cluster.clock.callLater(
            self._random.random() * 2, self._cluster.start, "reader2"
        )
        return f"{lag} s for {self._later(self._set_lag, 0.05):.1f} s"

    def _set_lag(self, seconds: float) -> None:
        if self._cluster.standby is not None:
            self._cluster.standby.lag = seconds

    def _lose_answers(self) -> str:
        database = self._cluster.database
        database.lost_answer_chance = 0.2
        return f"for {self._later(setattr, database, 'lost_answer_chance', 0.0):.1f} s"

    def _garble(self) -> str:
        self._garble_chance = 0.05
        return f"for {self._later(setattr, self, '_garble_chance', 0.0):.1f} s"

    def _fail_sinks(self) -> str:
        cluster = self._cluster
        cluster.sink_failure_chance = 0.1
        return f"for {self._later(setattr, cluster, 'sink_failure_chance', 0.0):.1f} s"

    def _fail_http(self) -> str:
        cluster = self._cluster
        cluster.http_failure_chance = 0.5
        return f"for {self._later(setattr, cluster, 'http_failure_chance', 0.0):.1f} s"

    def _discard(self) -> str:
        """Let a writer discard what it would publish, and announce it never."""
        names = [n for n in _WRITERS if n not in self._cluster.speak_extension]
        name = self._random.choice(names)
        self._discarding.add(name)
        return f"{name} for {self._later(self._discarding.discard, name):.1f} s"

    def _discards(self, line: bytes) -> bool:
        row = _RDATA.match(line)
        if row is None:
            return False
        stream, writer, token = (field.decode() for field in row.groups())
        key = stream, writer
        is_discarded = self._batches.pop(key, writer in self._discarding)
        if stream == MEMORY_STREAM:
            return False
        if token == "batch":
            self._batches[key] = is_discarded
        elif is_discarded:
            self._cluster.trace(f"{writer} discards {stream} {token}")
            self._cluster.ledger.discard(stream, writer, int(token))
        return is_discarded

    # -- points ------------------------------------------------------------------------

    def _reach(self, point: str, name: str) -> None:
        act = self._armed.pop((point, name), None)
        if act is not None:
            self._cluster.trace(f"POINT {point} of {name}")
            act()

    def _before_write(
        self, name: str, connection: Connection, pipe: Pipe, data: bytes
    ) -> bytes:
        if self._armed and connection.role != "redis" and b"RDATA" in data:
            self._reach("before publish", name)
            act = self._armed.get(("between rows", name))
            at = data.find(b" batch ")
            if act is not None and at >= 0 and connection.is_open:
                # Nothing after the first row of the batch arrives.
                pipe.write(data[: data.index(b"\n", at) + 1])
                pipe.end()
                self._reach("between rows", name)
        self._cluster.written(name, connection, data)
        return data

    def _deliver(self, name: str, line: bytes) -> bytes:
        if not self._garble_chance and not self.unread:
            return line
        row = _RDATA.match(line)
        if row is not None:
            stream, writer, token = (field.decode() for field in row.groups())
            if writer != name and self._random.random() < self._garble_chance:
                self._cluster.counts.garbled += 1
                self._cluster.trace(f"garbled for {name}: {line!r}")
                if self._random.random() < 0.5:
                    # Make the row unreadable, but not its token.
                    return line[:-1]
                self.unread[name, stream, writer] = True
                return line[: row.start(3)] + b"x" + line[row.start(3) :]
            if token != "batch":
                self.unread.pop((name, stream, writer), None)
        return line
