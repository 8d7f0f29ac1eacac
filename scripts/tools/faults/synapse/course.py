"""The steps of a run against one deployment: traffic, faults, verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import attrs

from scripts.tools.faults.stalls import LoggedStall, read_stalls
from scripts.tools.faults.synapse.alarms import Fault, is_true
from scripts.tools.faults.synapse.cluster import Cluster
from scripts.tools.faults.synapse.deployments import (
    DEPLOYMENTS,
    JUDGED,
    PROCESSES,
    READER,
)
from scripts.tools.faults.synapse.evidence import Evidence
from scripts.tools.faults.synapse.failed_reads import users_of_failed_reads
from scripts.tools.faults.synapse.meter import Meter
from scripts.tools.faults.synapse.nemeses import NEMESES, Scene, cause
from scripts.tools.faults.synapse.schedule import Round
from scripts.tools.faults.synapse.traffic import Traffic
from scripts.tools.faults.synapse.verdict import StreamTally, compare
from synapse_replication.errors import ReplicationError
from synapse_replication.streams.standard.registry import STANDARD_STREAMS

#: The interval at which evidence is collected, in s.
POLL = 0.1

#: The duration of traffic before a fault, and after it, in s.
TRAFFIC_BEFORE = 1.5
TRAFFIC_AFTER = 1.0

#: The default time within which all processes must catch up, in s.
PATIENCE = 30.0

Kind = tuple[str, bool]


@attrs.frozen
class RoundResult:
    """The result of one round.

    :ivar seconds: the time in s from the end of the fault until each process had all
        rows that were written before that; ``None`` if that took too long.
    :ivar missing: the rows that were still missing at the end of the round, as
        ``process stream token``.
    :ivar unseen: the changes that users had not seen at the end of the round, as
        ``stream key value``.
    """

    nemesis: str
    seconds: float | None
    missing: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


@attrs.frozen
class StreamResult:
    """A line of the table.

    :ivar never_shown: the number of accepted changes that users never saw; ``None`` if
        the process that serves them is not of this kind.
    :ivar failed_reads: the number of further changes whose rows were delivered, but
        which the homeserver omitted from a response because it failed to read them.
    :ivar seconds: the longest time until the processes had caught up, in s; ``None`` if
        a round took too long.
    """

    tally: StreamTally
    never_shown: int | None
    seconds: float | None
    failed_reads: int = 0

    @property
    def is_good(self) -> bool:
        """Whether this package neither lost, duplicated nor hid a row."""
        if not self.tally.is_ours:
            return True
        # The rows of an idempotent stream may be delivered more than once.
        stream = STANDARD_STREAMS[self.tally.stream].description
        duplicated = self.tally.duplicated if not stream.idempotent else 0
        return not (self.tally.lost or duplicated or self.never_shown)


@attrs.frozen
class DeploymentResult:
    """The result of all rounds against one deployment.

    :ivar requests: the number of requests of clients in the background.
    :ivar failures: the number of failed requests, which are expected during faults.
    :ivar lost: the lost rows, as ``process stream token``.
    :ivar late: the rows that processes with this package received after later ones, as
        ``process stream token``; without ``caches``, whose order does not matter.
    :ivar unannounced: the rows that no process received and that still exist, as
        ``stream token of writer``; ``None`` if no meter ran.
    :ivar consumed: those that a user or a newer row has removed since, so that the
        meter may have been too late to read them.
    :ivar metered: the rows that the meter found.
    :ivar alarms: the number of stalls and resets that processes reported.
    :ivar false_alarms: those that no fault explains.
    :ivar error: why the run was aborted; empty if it was not.
    """

    name: str
    rounds: tuple[RoundResult, ...]
    streams: tuple[StreamResult, ...]
    requests: int = 0
    failures: int = 0
    lost: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    unannounced: tuple[str, ...] | None = None
    consumed: tuple[str, ...] = ()
    metered: tuple[str, ...] = ()
    alarms: int = 0
    false_alarms: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the run finished, and neither lost, duplicated nor hid a row.

        No process may have reported a stall or a reset that no fault explains.
        If a meter ran, it must have found all rows that no process received, except for
        those that were removed, and no others.
        """
        return (
            not self.error
            and not self.false_alarms
            and (
                self.unannounced is None
                or set(self.metered) - set(self.consumed) == set(self.unannounced)
            )
            and all(stream.is_good for stream in self.streams)
        )


def run_deployment(
    name: str,
    schedule: Sequence[Round],
    print_line: Callable[[str], None],
    *,
    patience: float = PATIENCE,
    bug: str = "",
    with_meter: bool = False,
) -> DeploymentResult:
    """Run a schedule against a deployment.

    :param name: a key of :data:`DEPLOYMENTS`.
    :param print_line: prints a line.
    :param patience: the time in s within which all processes must catch up and users
        must see every change. Rows that take longer are checked again at the end of the
        run.
    :param bug: the dotted name of a deliberate bug for processes with this package.
    :param with_meter: whether to run ``follow --verify`` beside the deployment.
    """
    cluster = Cluster(DEPLOYMENTS[name], bug)
    try:
        began = time.time()
        cluster.start()
        # Until all processes run, the first ones truly report that others do not.
        start = Fault(("start",), frozenset(PROCESSES), began, time.time())
        meter = cluster.start_meter() if with_meter else None
        return _Course(name, cluster, print_line, patience, meter, start).run(schedule)
    except ReplicationError as error:
        return DeploymentResult(name, (), (), error=str(error))
    finally:
        cluster.close()


class _Course:
    """Performs the rounds of a schedule, and judges the evidence."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        print_line: Callable[[str], None],
        patience: float,
        meter: Meter | None,
        start: Fault,
    ) -> None:
        self._name = name
        self._meter = meter
        self._patience = patience
        self._cluster = cluster
        self._print_line = print_line
        self._evidence = Evidence(cluster)
        self._traffic = Traffic(cluster)
        self._seconds: dict[Kind, float | None] = {}
        self._faults = [start]

    def run(self, schedule: Sequence[Round]) -> DeploymentResult:
        traffic = self._traffic
        traffic.make_rooms()
        traffic.start()
        try:
            rounds = []
            for number, planned in enumerate(schedule, 1):
                result = self._run_round(planned)
                rounds.append(result)
                self._print_line(
                    _describe(self._name, number, len(schedule), planned, result)
                )
            # Check again at the end: late rows may have arrived.
            self._wait_until_shown()
            shown = self._cluster.shown_stalls()
            metered = () if self._meter is None else self._meter.finish()
        finally:
            traffic.stop()
        judged = self._judge_alarms(self._judge(tuple(rounds)), shown)
        if self._meter is None:
            return judged
        self._evidence.collect()
        unannounced, consumed = self._evidence.unannounced()
        return attrs.evolve(
            judged,
            unannounced=tuple(map(str, unannounced)),
            consumed=tuple(map(str, consumed)),
            metered=metered,
        )

    def _judge_alarms(
        self, result: DeploymentResult, shown: Sequence[LoggedStall]
    ) -> DeploymentResult:
        """Add the judgement of what processes reported.

        :param shown: the stalls that are shown although all faults have ended.
        """
        cluster = self._cluster
        reports = [
            report
            for name in sorted(cluster.mixture.on_ours)
            for report in read_stalls(name, cluster.process(name).log_tail(10**9))
        ]
        false = [
            str(report)
            for report in reports
            if not is_true(report, self._faults, cluster.starts_of_writer)
        ]
        false += [f"shown at the end: {report}" for report in shown]
        return attrs.evolve(
            result, alarms=len(reports) + len(shown), false_alarms=tuple(false)
        )

    def _run_round(self, planned: Round) -> RoundResult:
        scene = Scene(self._cluster, self._traffic, self._evidence, planned.chance)
        is_quiet = any(NEMESES[fault].is_quiet for fault in planned.faults)
        load = (
            self._traffic.eager_users()
            if is_quiet
            else self._traffic.writing(planned.seed)
        )
        with load:
            if not is_quiet:
                time.sleep(TRAFFIC_BEFORE)
            fault_began = time.time()
            cause(planned.faults, scene)
            fault_ended = time.time()
            self._faults.append(
                Fault(planned.faults, scene.victims, fault_began, fault_ended)
            )
            delays = self._wait_until_caught_up(fault_ended)
            time.sleep(TRAFFIC_AFTER)
        self._wait_until_shown()
        missing = self._evidence.end_round(fault_ended)
        undelivered = {row.stream for epoch, row in missing if epoch.process == READER}
        users = users_of_failed_reads(self._cluster.new_log_lines(READER))
        rooms = {
            room.room_id for room in self._traffic.rooms if room.bob.user_id in users
        }

        def has_failed_read(stream: str, key: Hashable) -> bool:
            return (
                stream == "receipts"
                and stream not in undelivered
                and isinstance(key, tuple)
                and key[0] in rooms
            )

        unseen = self._traffic.expectations.give_up(has_failed_read)
        for stream in JUDGED:
            for is_ours in (True, False):
                kind = stream, is_ours
                self._record_seconds(kind, delays.get(kind, 0.0))
        for epoch, row in missing:
            self._seconds[row.stream, epoch.is_ours] = None
        return RoundResult(
            planned.nemesis,
            None if missing else max(delays.values(), default=0.0),
            tuple(
                f"{epoch.process} {row.stream} {row.token}" for epoch, row in missing
            ),
            tuple(unseen),
        )

    def _record_seconds(self, kind: Kind, seconds: float) -> None:
        before = self._seconds.get(kind, 0.0)
        self._seconds[kind] = None if before is None else max(before, seconds)

    def _wait_until_caught_up(self, fault_ended: float) -> dict[Kind, float]:
        """Wait until all rows written before the end of a fault are delivered.

        :param fault_ended: when the fault ended, in s since the Unix epoch.
        :return: by kind, the time in s from the end of the fault to the last check at
            which a row was missing.
        """
        delays: dict[Kind, float] = {}
        while True:
            answered = self._evidence.collect()
            now = time.time()
            missing = self._evidence.new_missing(fault_ended) if answered else []
            for epoch, row in missing:
                delays[row.stream, epoch.is_ours] = now - fault_ended
            if (answered and not missing) or now - fault_ended > self._patience:
                return delays
            time.sleep(POLL)

    def _wait_until_shown(self) -> None:
        """Wait until all rows are delivered and shown, or the timeout expires."""
        deadline = time.time() + self._patience
        while time.time() < deadline:
            answered = self._evidence.collect()
            if (
                answered
                and self._traffic.expectations.is_fulfilled()
                and not self._evidence.new_missing(time.time())
            ):
                return
            time.sleep(POLL)

    def _judge(self, rounds: tuple[RoundResult, ...]) -> DeploymentResult:
        evidence, traffic = self._evidence, self._traffic
        epochs, rows = evidence.epochs, evidence.rows
        hidden: Counter[str] = traffic.expectations.never_shown()
        failed_reads = traffic.expectations.failed_reads()
        reader_is_ours = self._cluster.is_ours(READER)
        tallies = compare(rows, epochs, evidence.present(JUDGED), JUDGED)
        streams = tuple(
            StreamResult(
                tally,
                hidden[tally.stream] if tally.is_ours is reader_is_ours else None,
                self._seconds.get((tally.stream, tally.is_ours), 0.0),
                failed_reads[tally.stream] if tally.is_ours is reader_is_ours else 0,
            )
            for tally in tallies
        )
        lost = evidence.missing(time.time())
        return DeploymentResult(
            self._name,
            rounds,
            streams,
            traffic.requests,
            traffic.failures,
            tuple(f"{epoch.process} {row}" for epoch, row in lost),
            tuple(
                f"{epoch.process} {late.stream} {late.token}"
                for epoch in epochs
                if epoch.is_ours
                for late in epoch.late
                if not STANDARD_STREAMS[late.stream].description.idempotent
            ),
        )


def _describe(
    deployment: str, number: int, count: int, planned: Round, result: RoundResult
) -> str:
    what = planned.nemesis
    if len(planned.faults) > 1:
        what += f" ({', '.join(planned.faults)})"
    outcome = (
        f"caught up after {result.seconds:.1f} s"
        if result.seconds is not None
        else f"still missing: {', '.join(result.missing[:5])}"
    )
    unseen = "".join(f", not shown: {promise}" for promise in result.unseen[:5])
    return f"{deployment} {number}/{count} {what}: {outcome}{unseen}"
