"""``synapse-replication status``: prints the status of a whole deployment.

The command requests the status of each process in ``instance_map`` over HTTP, from its
replication listener, with the ``worker_replication_secret``. Exit status: 0 if there is
no problem; 1 if there is one, or no status could be shown; 2 if the configuration is
invalid, or its ``instance_map`` is empty. :attr:`DeploymentStatus.is_well` lists the
problems. With ``--watch``, the last update determines the exit status.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import attrs
import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.app.instances import InstanceState, ask_instances
from synapse_replication.app.status_page import PageVerdict, duration, judge
from synapse_replication.cli import common
from synapse_replication.http.agent import make_agent
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.instrumentation.status import model
from synapse_replication.text import counted, printable

#: The interval of requests with ``--watch``, in s.
REFRESH_INTERVAL = 2.0

#: The style of each tone of a verdict, worst first.
_STYLES = {"bad": "bold red", "busy": "yellow", "good": "green"}


@attrs.frozen
class DeploymentStatus:
    """The status of all processes in ``instance_map``.

    :ivar processes: the statuses that were received, by instance name.
    :ivar unreachable: why a process returned no valid status, by instance name.
    :ivar stock: the stock instances that run.
    :ivar not_in_instance_map: instances that send heartbeats but are not in
        ``instance_map``, so that their status was not requested.
    """

    processes: Mapping[str, model.ProcessStatus]
    unreachable: Mapping[str, str]
    not_in_instance_map: tuple[str, ...] = ()
    stock: tuple[str, ...] = ()

    @property
    def is_well(self) -> bool:
        """Whether each process runs, and no status shows a problem.

        The problems that a status can show are a stalled writer, a name that two
        processes use, a stuck id, damaged rows of a sink, and the lack of any link for
        some time.
        """
        return not self.unreachable and all(
            judge(status).tone != "bad" for status in self.processes.values()
        )


@attrs.define(eq=False, repr=False)
class StatusService(Service):
    """Requests the status of processes, once or periodically until :meth:`stopService`.

    :param clock: schedules the requests.
    :param fetch: requests the status of a process, by its name; returns a coroutine of
        the status as JSON.
    :param names: the names of the processes.
    :param show: called with each status of the deployment.
    :param at_end: called when the requests end, unless the service is being stopped.
    :param close: closes the connections when the service is stopped.
    :param watch: whether to request the status periodically.
    :ivar started: fires when the service is started, before any response.
    :ivar is_well: whether the last status of the deployment shows no problem; false
        before the first status, and after a status that could not be shown.
    :ivar output_error: why the output could not be written, if so.
    """

    log = Logger()

    _clock: Any
    _fetch: Callable[[str], Any]
    _names: tuple[str, ...]
    _show: Callable[[DeploymentStatus], object]
    _at_end: Callable[[], object]
    _close: Callable[[], Any] = attrs.field(default=lambda: None, kw_only=True)
    _watch: bool = attrs.field(kw_only=True)
    _call: LoopingCall = attrs.field(init=False)
    started: Deferred[None] = attrs.field(factory=Deferred, init=False)
    is_well: bool = attrs.field(default=False, init=False)
    output_error: OSError | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._call = LoopingCall(self._fetch_all)
        self._call.clock = self._clock

    @override
    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self.started.callback(None)
        ended = self._call.start(REFRESH_INTERVAL)
        if not self._watch and self._call.running:
            self._call.stop()
        ended.addErrback(self._failed)
        ended.addCallback(self._end)

    @override
    def stopService(self) -> Any:
        super().stopService()  # type: ignore[no-untyped-call]
        if self._call.running:
            self._call.stop()
        return self._close()

    def _failed(self, failure: Failure) -> None:
        self.is_well = False
        if isinstance(failure.value, OSError):
            self.output_error = failure.value
            return
        self.log.failure("Cannot show the status of the deployment", failure)

    def _end(self, result: object) -> None:
        if self.running:
            self._at_end()

    async def _fetch_all(self) -> None:
        reports = await ask_instances(self._fetch, self._names)
        processes = {
            each.name: each.status
            for each in reports
            if each.status is not None and each.is_alive
        }
        unreachable = {each.name: each.detail for each in reports if not each.is_alive}
        stock = [each.name for each in reports if each.state is InstanceState.STOCK]
        alive = {
            peer.instance_name
            for status in processes.values()
            for peer in status.peers
            if not peer.is_gone
        }
        not_in_instance_map = tuple(sorted(alive.difference(self._names)))
        deployment = DeploymentStatus(
            processes, unreachable, not_in_instance_map, tuple(stock)
        )
        self.is_well = deployment.is_well
        self._show(deployment)


def render(deployment: DeploymentStatus, *, everything: bool = False) -> RenderableType:
    """Return the status for a terminal: instances, worst first; writers; a summary.

    :param everything: whether to list also the writers without a problem.
    """
    parts: list[RenderableType] = []
    for name, why in sorted(deployment.unreachable.items()):
        parts.append(common.cell(f"{name}: no valid status: {why}", "bold red"))
    verdicts = {name: judge(status) for name, status in deployment.processes.items()}
    tones = list(_STYLES)
    for name in sorted(verdicts, key=lambda n: (tones.index(verdicts[n].tone), n)):
        parts += _render_process(name, deployment.processes[name], verdicts[name])
    parts += [
        common.cell(f"{name}: stock, running") for name in sorted(deployment.stock)
    ]
    if deployment.not_in_instance_map:
        names = ", ".join(deployment.not_in_instance_map)
        parts.append(common.cell(f"Not in instance_map, but alive: {names}"))
    parts += _writers(deployment, everything=everything)
    parts.append(_summary(deployment, verdicts))
    return Group(*parts)


def _summary(deployment: DeploymentStatus, verdicts: Mapping[str, PageVerdict]) -> Text:
    """Return the line that counts instances and writers by their state."""
    tones = Counter(verdict.tone for verdict in verdicts.values())
    counts = {
        "not answering": len(deployment.unreachable),
        "with a problem": tones["bad"],
        "catching up or waiting": tones["busy"],
        "well": tones["good"],
        "stock": len(deployment.stock),
    }
    instances = counted(sum(counts.values()), "instance")
    found = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    conditions = Counter(
        writer.condition
        for status in deployment.processes.values()
        for writer in status.writers
    )
    states = ", ".join(
        f"{conditions[each]} {each.value}"
        for each in model.WORST_FIRST
        if conditions[each]
    )
    text = f"{instances}: {found}" + (f"; writers: {states}" if states else "")
    return common.cell(text, "green" if deployment.is_well else "bold red")


def _render_process(
    name: str, status: model.ProcessStatus, verdict: PageVerdict
) -> list[RenderableType]:
    line = common.cell(f"{name}: ")
    line.append(verdict.text, _STYLES[verdict.tone])
    down = ", ".join(link.name for link in status.links if not link.up)
    line.append(f" (down: {down})" if down else "")
    parts: list[RenderableType] = [line]
    for duplicate in status.duplicates:
        places = duplicate.places or "locations unknown"
        text = f"  two processes are called {duplicate.instance_name} ({places})"
        parts.append(common.cell(text, "red"))
    for group in model.group_stalls(status.writers):
        since = duration(group.stalled_for)
        text = f"  {group.names}: stalled for {since}: {group.detail}"
        parts += [common.cell(text, "red"), common.cell(f"  -> {group.hint}")]
    for stuck in status.stuck_ids:
        since, what = duration(stuck.age), model.describe_stuck_id(stuck)
        session = stuck.session or "the database is being asked for its session"
        parts.append(common.cell(f"  {what} for {since}: {session}", "red"))
        if stuck.hint:
            parts.append(common.cell(f"  -> {stuck.hint}"))
    if status.damage:
        parts.append(common.cell(f"  {status.damage}", "red"))
    return parts


#: The conditions of writers that need no attention.
_HEALTHY = (model.Condition.LIVE, model.Condition.WRITTEN_HERE)
_TITLES = (
    "Process",
    "Stream",
    "Writer",
    "State",
    "Position",
    "Behind, ids",
    "Behind, time",
)


def _writers(deployment: DeploymentStatus, *, everything: bool) -> list[Text]:
    """Return a line for each writer, in columns as wide as their longest entry.

    A terminal that is too narrow wraps the lines: names are never cut.
    """
    rows = [
        (writer, name)
        for name, status in deployment.processes.items()
        for writer in status.writers
        if everything or writer.condition not in _HEALTHY
    ]
    rows.sort(
        key=lambda row: (
            model.WORST_FIRST.index(row[0].condition),
            row[1],
            row[0].stream_name,
            row[0].instance_name,
        )
    )
    cells = [_TITLES, *(_cells(writer, name) for writer, name in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    styles = ["bold"] + [
        "red" if writer.condition is model.Condition.STALLED else ""
        for writer, _ in rows
    ]
    lines = [
        common.cell(
            "  ".join(
                cell.ljust(width) if index < 4 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip(),
            style,
        )
        for row, style in zip(cells, styles, strict=True)
    ]
    return lines if rows else []


def _cells(writer: model.WriterStatus, name: str) -> tuple[str, ...]:
    state = writer.condition.value
    if writer.started_from is not None:
        state += f", {model.describe_progress(writer)}"
    return (
        printable(name),
        printable(writer.stream_name),
        printable(writer.instance_name),
        state,
        "?" if writer.position is None else f"{writer.position:,}",
        model.describe_lag(writer),
        duration(writer.lag_seconds) if writer.lag else "",
    )


@common.command(
    "status", "status -c homeserver.yaml", "status -c homeserver.yaml --watch"
)
@common.config_option
@click.option("--watch", is_flag=True, help="Update the display until Ctrl-C.")
@click.option("--all", "everything", is_flag=True, help="List also what is well.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per update.")
def status_command(
    config_paths: tuple[str, ...], watch: bool, everything: bool, as_json: bool
) -> NoReturn:
    """Print what is wrong in a deployment. Exit status 1 if there is a problem."""
    from synapse_replication.app.service_runner import run_service, start_logging

    config = common.load_or_exit(config_paths, "status")
    names = tuple(sorted(config.instances))
    if not names:
        common.fail(
            "synapse-replication: instance_map is empty; add the processes and the "
            "addresses of their replication listeners"
        )
    start_logging(sys.stderr, "warn")
    reactor = common.get_reactor()
    agent, pool = make_agent(reactor, config.instances, config.tls.for_connecting)
    client = HttpCatchUpClient(agent, config.instances, config.secret, reactor)
    console = Console()
    live = Live(console=console, auto_refresh=False, screen=True)
    on_screen = watch and not as_json and console.is_terminal

    def show(deployment: DeploymentStatus) -> None:
        if as_json:
            click.echo(msgspec.json.encode(deployment).decode())
        elif on_screen:
            live.update(render(deployment, everything=everything), refresh=True)
        else:
            shown = render(deployment, everything=everything)
            console.print(shown, soft_wrap=True)
            sys.stdout.flush()

    service = StatusService(
        reactor,
        client.get_status,
        names,
        show,
        reactor.stop,
        close=pool.closeCachedConnections,
        watch=watch,
    )
    with live if on_screen else contextlib.nullcontext():
        status = run_service(reactor, lambda: service)
    if service.output_error is not None:
        common.fail_to_write(service.output_error)
    sys.exit(status or int(not service.is_well))
