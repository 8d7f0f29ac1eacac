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
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import attrs
import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.app.status_page import PageVerdict, duration, judge
from synapse_replication.cli import common
from synapse_replication.errors import ReplicationError
from synapse_replication.http.agent import make_agent
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.instrumentation.status import model
from synapse_replication.text import printable

#: The interval of requests with ``--watch``, in s.
REFRESH_INTERVAL = 2.0

#: The style of each tone of a verdict, worst first.
_STYLES = {"bad": "bold red", "busy": "yellow", "good": "green"}


@attrs.frozen
class DeploymentStatus:
    """The status of all processes in ``instance_map``.

    :ivar processes: the statuses that were received, by instance name.
    :ivar unreachable: why a process returned no valid status, by instance name.
    :ivar not_in_instance_map: instances that send heartbeats but are not in
        ``instance_map``, so that their status was not requested.
    """

    processes: Mapping[str, model.ProcessStatus]
    unreachable: Mapping[str, str]
    not_in_instance_map: tuple[str, ...] = ()

    @property
    def is_well(self) -> bool:
        """Whether each process returned a valid status, and none shows a problem.

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
        self.log.failure("Cannot show the status of the deployment", failure)

    def _end(self, result: object) -> None:
        if self.running:
            self._at_end()

    async def _fetch_all(self) -> None:
        requests = {
            name: Deferred.fromCoroutine(self._fetch(name)) for name in self._names
        }
        processes: dict[str, model.ProcessStatus] = {}
        unreachable: dict[str, str] = {}
        for name, request in requests.items():
            try:
                processes[name] = model.decode_status(await request)
            except ReplicationError as error:
                unreachable[name] = str(error)
        alive = {
            peer.instance_name
            for status in processes.values()
            for peer in status.peers
            if not peer.is_gone
        }
        not_in_instance_map = tuple(sorted(alive.difference(self._names)))
        deployment = DeploymentStatus(processes, unreachable, not_in_instance_map)
        self.is_well = deployment.is_well
        self._show(deployment)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def render(deployment: DeploymentStatus) -> RenderableType:
    """Return the status for a terminal: each process, worst first; then all writers.

    Processes that returned no valid status precede all others.
    """
    parts: list[RenderableType] = []
    for name, why in sorted(deployment.unreachable.items()):
        parts.append(_text(f"{name}: no valid status: {why}", "bold red"))
    verdicts = {name: judge(status) for name, status in deployment.processes.items()}
    tones = list(_STYLES)
    for name in sorted(verdicts, key=lambda n: (tones.index(verdicts[n].tone), n)):
        parts += _render_process(name, deployment.processes[name], verdicts[name])
    if deployment.not_in_instance_map:
        names = ", ".join(deployment.not_in_instance_map)
        parts.append(_text(f"Not in instance_map, but alive: {names}"))
    parts.append(_writers(deployment))
    return Group(*parts)


def _render_process(
    name: str, status: model.ProcessStatus, verdict: PageVerdict
) -> list[RenderableType]:
    line = _text(f"{name}: ")
    line.append(verdict.text, _STYLES[verdict.tone])
    down = ", ".join(link.name for link in status.links if not link.up)
    line.append(f" (down: {down})" if down else "")
    parts: list[RenderableType] = [line]
    for duplicate in status.duplicates:
        places = duplicate.places or "locations unknown"
        text = f"  two processes are called {duplicate.instance_name} ({places})"
        parts.append(_text(text, "red"))
    for group in model.group_stalls(status.writers):
        since = duration(group.stalled_for)
        text = f"  {group.names}: stalled for {since}: {group.detail}"
        parts += [_text(text, "red"), _text(f"  -> {group.remedy}")]
    for stuck in status.stuck_ids:
        since, what = duration(stuck.age), model.describe_stuck_id(stuck)
        parts.append(_text(f"  {what} for {since}: {stuck.session}", "red"))
        parts.append(_text(f"  -> {stuck.hint}"))
    if status.damage:
        parts.append(_text(f"  {status.damage}", "red"))
    return parts


def _writers(deployment: DeploymentStatus) -> Table:
    table = Table("Process", "Stream", "Writer", "State", box=None, pad_edge=False)
    for title in ("Position", "Behind, ids", "Behind, time"):
        table.add_column(title, justify="right")
    rows = [
        (writer, name)
        for name, status in deployment.processes.items()
        for writer in status.writers
    ]
    rows.sort(
        key=lambda row: (
            model.WORST_FIRST.index(row[0].condition),
            row[1],
            row[0].stream_name,
            row[0].instance_name,
        )
    )
    for writer, name in rows:
        state = writer.condition.value
        if writer.started_from is not None:
            state += f", {model.describe_progress(writer)}"
        style = "red" if writer.condition is model.Condition.STALLED else ""
        table.add_row(
            _text(name),
            _text(writer.stream_name),
            _text(writer.instance_name),
            _text(state, style),
            "?" if writer.position is None else f"{writer.position:,}",
            model.describe_lag(writer),
            duration(writer.lag_seconds) if writer.lag else "",
        )
    return table


@common.command(
    "status", "status -c homeserver.yaml", "status -c homeserver.yaml --watch"
)
@common.config_option
@click.option("--watch", is_flag=True, help="Update the display until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per update.")
def status_command(
    config_paths: tuple[str, ...], watch: bool, as_json: bool
) -> NoReturn:
    """Print the status of a deployment. Exit status 1 if there is a problem."""
    from synapse_replication.app.service_runner import run_service, start_logging

    config = common.load_or_exit(config_paths, "follow")
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
            live.update(render(deployment), refresh=True)
        else:
            console.print(render(deployment))

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
    sys.exit(status or int(not service.is_well))
