"""Measures the cost of hostile input to the processes of a deployment.

Six real processes under a light load receive each kind of input: every command, message
of the extension and HTTP route, small and in a burst of ten thousand, and as large as a
receiver reads. The results are the rows of the table in ``docs/security.rst``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import attrs
from typing_extensions import override

from scripts.tools import hostile
from scripts.tools.faults.deployment import FaultDeployment, Needs
from scripts.tools.proc import processor_seconds
from synapse_replication.demo.deployment import (
    READERS,
    SERVER_NAME,
    DemoPlan,
    wait_until_ready,
)
from synapse_replication.errors import ServerStartError
from synapse_replication.recordings.reader import shipped_recording
from synapse_replication.wire.extension import MessageType

#: The load during all measurements, in rows per second.
RATE = 50.0
#: The number of small messages of a kind, and of large ones.
BURST, LARGE = 10_000, 50
#: The bytes of the largest line over direct TCP, and of a large message over Redis.
TCP_SIZE, REDIS_SIZE = 16_000, 1_000_000
#: The time in s within which an attack must be sent, and the first rows must arrive.
SEND_TIMEOUT, ROWS_TIMEOUT = 30.0, 60.0
#: The limits: the CPU time of a turn and the time until the next row, in s.
MOST_TURN, MOST_DELAY = 0.25, 5.0
#: The memory that may be in use at most, as a multiple of that before: when the same
#: attack is repeated, and after the first time, which may enlarge the heap for good;
#: and the time in s after which it must have been freed.
MOST_MEMORY, MOST_FIRST_MEMORY, MEMORY_TIMEOUT = 1.1, 1.25, 60.0
_EXTENSION = "/replication_ext"

#: For each command, the fields of a small line, which contain a number, and those of a
#: large one.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "SERVER": ("s%d", "%s"),
    "NAME": ("ghost%d", "%s"),
    "REPLICATE": ("", "%s"),
    "POSITION": ("events ghost%d 0 7", "events %s 0 7"),
    "RDATA": ('events event_writer1 7 ["ev",%d]', 'events event_writer1 7 ["%s"]'),
    "PING": ("%d", "%s"),
    "ERROR": ("%d", "%s"),
    "USER_SYNC": ("reader1 @u%d:x start 1", "reader1 %s start 1"),
    "CLEAR_USER_SYNC": ("ghost%d", "%s"),
    "FEDERATION_ACK": ("ghost%d 7", "%s 7"),
    "USER_IP": (
        '@u%d:x ["t","1.2.3.4","a",null,1]',
        '@u:x ["t","1.2.3.4","%s",null,1]',
    ),
    "REMOTE_SERVER_UP": ("s%d.example", "%s"),
    "LOCK_RELEASED": ('["ghost","lock","%d"]', '["ghost","lock","%s"]'),
    "NEW_ACTIVE_TASK": ("t%d", "%s"),
    "CANCEL_TASK": ("t%d", "%s"),
    "REMOVE_PUSHER": ("app key%d @u:x", "app %s @u:x"),
    "INVALIDATE_CACHE": ('name ["%d"]', 'name ["%s"]'),
}
MESSAGE_TYPES = tuple(kind.value for kind in MessageType)
#: The paths that processes serve.
ROUTES = (
    "/health",
    "/ready",
    "/metrics",
    "/_synapse/metrics",
    "/status",
    "/status.json",
    "/_synapse/replication/status",
    "/_synapse/replication/get_repl_stream_updates/events/txn",
    "/nothing",
)


@attrs.frozen
class Attack:
    """One kind of input.

    :ivar what: the description of the input in the table.
    :ivar run: sends the input; returns the number of sent messages.
    :ivar direct_tcp: whether the attack needs a deployment without Redis.
    """

    what: str
    run: Callable[[FaultDeployment], int]
    direct_tcp: bool = False


@attrs.frozen
class Cost:
    """The cost of an attack to the processes: of each figure, the worst.

    :ivar sent: the number of sent messages.
    :ivar reactor: the CPU time of the reactor, in s.
    :ivar turn: the CPU time of the longest turn, and its duration, in s.
    :ivar next_row: the time from the end of the attack until the next row of each
        writer of events had arrived at a reader, in s.
    :ivar memory: the resident memory in MiB before the attack, its peak, and the
        resident memory afterwards, of the process that uses the most in addition.
    """

    sent: int
    reactor: float
    turn: tuple[float, float]
    next_row: float
    memory: tuple[float, float, float]

    @property
    def growth(self) -> float:
        """The memory afterwards as a multiple of that before."""
        before, _, after = self.memory
        return after / before

    @property
    def is_quick(self) -> bool:
        """Whether the limits of time are kept."""
        return self.turn[0] <= MOST_TURN and self.next_row <= MOST_DELAY

    @property
    def is_bounded(self) -> bool:
        """Whether all limits are kept."""
        return self.is_quick and self.growth <= MOST_MEMORY

    @property
    def must_be_repeated(self) -> bool:
        """Whether only a repeat shows if memory is kept each time."""
        return self.is_quick and MOST_MEMORY < self.growth <= MOST_FIRST_MEMORY


def command_lines(name: str, size: int | None = None) -> Iterator[bytes]:
    """Yield lines of a command: small ones, or of a size in bytes."""
    small, large = (f"{name} {fields}".rstrip() for fields in COMMANDS[name])
    for number in count():
        if size is None:
            yield (small % number if "%" in small else small).encode()
        else:
            yield (large % ("x" * (size + 2 - len(large)))).encode()


def extension_messages(kind: str, *, large: bool = False) -> Iterator[bytes]:
    """Yield messages of a type of the extension, each of an instance of its own."""
    streams = (
        [f"s{number}" + "x" * 80 for number in range(500)] if large else ["events"]
    )
    for number in count():
        message = {
            "v": 1,
            "type": kind,
            "instance": f"ghost{number}",
            "epoch": f"e{number}",
            "time": int(time.time() * 1000),
            "positions": {name: [7, int(time.time() * 1000)] for name in streams},
        }
        if kind == "silent":
            message["silent"] = ["event_writer1", f"e{number}", 20]
        if kind == "command":
            message["line"] = f"REMOTE_SERVER_UP s{number}.example"
            message["reached"] = [f"r{number}" for number in range(500 if large else 1)]
        yield json.dumps(message, separators=(",", ":")).encode()


def _publish(
    what: str, *bursts: tuple[Iterator[bytes], int], suffix: str = ""
) -> Attack:
    def run(deployment: FaultDeployment) -> int:
        assert deployment.redis is not None
        port, channel = deployment.redis.port, SERVER_NAME + suffix
        return sum(
            hostile.publish(port, channel, islice(lines, most), SEND_TIMEOUT)
            for lines, most in bursts
        )

    return Attack(f"{what} over Redis", run)


def _send(what: str, *bursts: tuple[Iterator[bytes], int]) -> Attack:
    def run(deployment: FaultDeployment) -> int:
        port = deployment.tcp_ports["event_writer1"]
        return sum(
            hostile.send_lines(port, lines, SEND_TIMEOUT, most)
            for lines, most in bursts
        )

    return Attack(f"{what} over direct TCP", run, direct_tcp=True)


def _attack_with_commands() -> Iterator[Attack]:
    for name in COMMANDS:
        small, lines = command_lines(name), command_lines(name, REDIS_SIZE)
        yield _publish(name, (small, BURST), (lines, LARGE))
        small, lines = command_lines(name), command_lines(name, TCP_SIZE)
        yield _send(name, (small, BURST), (lines, BURST // 10))


def _attack_with_messages() -> Iterator[Attack]:
    for kind in MESSAGE_TYPES:
        small = extension_messages(kind), BURST
        large = extension_messages(kind, large=True), LARGE * 4
        yield _publish(f"Extension: {kind}", small, large, suffix=_EXTENSION)
        lines = (b"REPLICATION_EXT " + each for each in extension_messages(kind))
        yield _send(f"Extension: {kind}", (lines, BURST))


def _attack_with_requests() -> Iterator[Attack]:
    for path in ROUTES:
        yield Attack(
            f"GET {path}",
            lambda deployment, path=path: hostile.get_often(  # type: ignore[misc]
                deployment.socket_of(READERS[0]), path, BURST, SEND_TIMEOUT
            ),
        )
    yield Attack(
        "HTTP bodies of 5 MiB without a secret",
        lambda deployment: hostile.post_bodies(
            deployment.socket_of(READERS[0]), 5 << 20, 10**9, 5.0
        ),
    )
    yield Attack(
        "Incomplete HTTP requests",
        lambda deployment: hostile.send_incomplete_requests(
            int(deployment.status_page.split(":")[2].split("/")[0]), 1040, 5.0
        ),
    )


ATTACKS = (
    *_attack_with_commands(),
    *_attack_with_messages(),
    *_attack_with_requests(),
    _publish("Gaps of a declared writer", (hostile.gap_positions(5000), BURST)),
    _publish("Rows without the last of a batch", (hostile.open_batches(), BURST)),
    _publish("Rows of a stream in memory", (hostile.gap_rows(), BURST)),
    _publish("Nested rows of 1 MB", (hostile.large_rows(REDIS_SIZE), LARGE)),
    _publish("Nested rows of 15 MB", (hostile.large_rows(15 * REDIS_SIZE), 6)),
    _publish("Forged epochs", (hostile.forged_epochs(), BURST), suffix=_EXTENSION),
    _publish("Invalid lines", (hostile.invalid_lines(), BURST)),
    _send("Nested rows of 16 KB", (hostile.large_rows(TCP_SIZE), BURST)),
    _send("Lines beyond the limit", (hostile.long_names(TCP_SIZE + 1000), BURST // 10)),
    _send("Invalid lines", (hostile.invalid_lines(), BURST)),
    Attack(
        "Connections with made-up names",
        lambda deployment: hostile.connect_with_names(
            deployment.tcp_ports["event_writer1"], BURST, 5.0
        ),
        direct_tcp=True,
    ),
    Attack(
        "Silent connections",
        lambda deployment: hostile.connect_silently(
            deployment.tcp_ports["event_writer1"], 900, 5.0
        ),
        direct_tcp=True,
    ),
)


class CostDeployment(FaultDeployment):
    """A deployment whose processes record their long turns."""

    def turns_of(self, name: str) -> Path:
        """Return the path of the file with the long turns of an instance."""
        return self.directory / f"{name}.turns.jsonl"

    @override
    def _own_config(self, name: str) -> dict[str, Any]:
        config = super()._own_config(name)
        config["synapse_replication"].setdefault("modules", []).append(
            {
                "module": "scripts.tools.faults.turns.make_recorder",
                "config": {"path": str(self.turns_of(name))},
            }
        )
        return config


class _Meter:
    """Measures one process from its creation on."""

    def __init__(self, deployment: CostDeployment, name: str) -> None:
        self._deployment, self._name = deployment, name
        pid = deployment.processes[name].pid
        # The reactor's thread is the first one.
        self._stat = Path(f"/proc/{pid}/task/{pid}/stat")
        self._before = deployment.memory_of(name)
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._turns = deployment.turns_of(name).stat().st_size
        self._cpu = self._read_cpu()

    def _read_cpu(self) -> float:
        return processor_seconds(self._stat.read_text())

    def cpu(self) -> float:
        return self._read_cpu() - self._cpu

    def longest_turn(self) -> tuple[float, float]:
        with self._deployment.turns_of(self._name).open("rb") as file:
            file.seek(self._turns)
            turns = [json.loads(line) for line in file if line.endswith(b"\n")]
        return max(((turn["cpu"], turn["wall"]) for turn in turns), default=(0.0, 0.0))

    def memory(self) -> tuple[float, float, float]:
        return (
            self._before,
            self._deployment.memory_of(self._name, "VmHWM"),
            self._deployment.memory_of(self._name),
        )

    @property
    def growth(self) -> float:
        return self._deployment.memory_of(self._name) / self._before


def measure(deployment: CostDeployment, attack: Attack) -> Cost:
    """Attack a deployment, and measure all of its processes."""
    meters = [_Meter(deployment, name) for name in deployment.processes]
    sent = attack.run(deployment)
    next_row = deployment.wait_for_next_rows(ROWS_TIMEOUT)
    time.sleep(1.0)
    reactor = max(meter.cpu() for meter in meters)
    deadline = time.monotonic() + MEMORY_TIMEOUT
    while (
        max(meter.growth for meter in meters) > MOST_MEMORY
        and time.monotonic() < deadline
    ):
        time.sleep(1.0)
    return Cost(
        sent,
        reactor,
        max(meter.longest_turn() for meter in meters),
        next_row,
        max(meters, key=lambda meter: meter.growth).memory(),
    )


def _wait_for_rows(deployment: FaultDeployment) -> None:
    """Wait until rows arrive.

    :raises ServerStartError: if a process ended, or no row arrived in time.
    """
    if deployment.wait_for_next_rows(ROWS_TIMEOUT) >= ROWS_TIMEOUT:
        raise ServerStartError(f"no rows arrived within {ROWS_TIMEOUT:.0f} s")


def _deploy(*, direct_tcp: bool) -> CostDeployment:
    plan = DemoPlan(shipped_recording(), 0, RATE, use_redis=not direct_tcp)
    deployment = CostDeployment(plan, Needs(direct_tcp=direct_tcp), 0)
    try:
        deployment.start_servers()
        deployment.start_processes()
        wait_until_ready(deployment.processes.values())
        deployment.let_writers_begin()
        _wait_for_rows(deployment)
    except BaseException:
        deployment.close()
        raise
    return deployment


def measure_costs(only: str, print_line: Callable[[str], object]) -> bool:
    """Measure the cost of each attack; print the rows of a table.

    :param only: a part of the names of the attacks to make; empty for all.
    :return: whether all limits are kept.
    """
    are_bounded = True
    for direct_tcp in (True, False):
        attacks = [
            attack
            for attack in ATTACKS
            if attack.direct_tcp == direct_tcp and only.lower() in attack.what.lower()
        ]
        if not attacks:
            continue
        deployment = _deploy(direct_tcp=direct_tcp)
        try:
            for attack in attacks:
                cost = measure(deployment, attack)
                if cost.must_be_repeated:
                    print_line(_row(attack, cost))
                    cost = measure(deployment, attack)
                print_line(_row(attack, cost))
                are_bounded = are_bounded and cost.is_bounded
        finally:
            deployment.close()
    return are_bounded


def _row(attack: Attack, cost: Cost) -> str:
    cells = (
        f"{cost.sent:,}",
        f"{cost.reactor:.1f}",
        f"{1000 * cost.turn[0]:.0f} ({1000 * cost.turn[1]:.0f})",
        f"{cost.next_row:.1f}",
        "; ".join(f"{size:.0f}" for size in cost.memory),
    )
    marks = "" if cost.is_bounded else " *"
    return f"   {attack.what}{marks}|" + "|".join(cells)
