"""The command line: ``synapse-replication``.

Exit status of most commands: 0 for success, 1 if something failed, 2 if the command or
the configuration is invalid (in that case, nothing was started). docs/commands.rst has
a table of the exit status of every command.

Modules that only some commands need are imported when such a command is looked up or
runs, so that the other commands start fast and need fewer extras. ``synapse-replication
--help`` looks up all commands.
"""

from __future__ import annotations

import functools
import gc
import importlib
import linecache
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click
from typing_extensions import override

from synapse_replication import __version__
from synapse_replication.cli import common
from synapse_replication.errors import ConfigError, ConfigProblem, ReplicationError
from synapse_replication.extras import explain_missing
from synapse_replication.wire.commands import COMMANDS

if TYPE_CHECKING:
    from synapse_replication.config.process import ProcessConfig, Purpose

#: The smallest limit of open files of a process. One of seven processes opens 20 to 31.
MIN_FILES: Final = 32

#: The commands that are imported when they are looked up, and their modules in
#: ``synapse_replication.cli``.
_LAZY: Final = {
    "demo": "demo",
    "exec": "exec",
    "init-db": "database",
    "monitor": "monitor",
    "pipeline": "pipeline",
    "positions": "database",
    "record": "record",
    "replay": "replay",
    "status": "status",
}


class _LazyGroup(click.Group):
    """A group some of whose commands are imported when they are looked up.

    ``--help`` looks up all commands. The look-up of a command therefore does not fail
    if the command's database driver is not installed: it returns a command that reports
    this.
    """

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *_LAZY})

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _LAZY:
            return super().get_command(ctx, cmd_name)
        try:
            module = importlib.import_module(
                f"synapse_replication.cli.{_LAZY[cmd_name]}"
            )
        except ModuleNotFoundError as error:
            if explain_missing(error) is None:
                raise
            return _make_unavailable(cmd_name, error)
        name = f"{cmd_name.replace('-', '_')}_command"
        command: click.Command = getattr(module, name)
        return command

    @override
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            text = explain_missing(error)
            if text is None:
                raise
            common.fail(f"synapse-replication {ctx.invoked_subcommand}: {text}")


def _make_unavailable(name: str, error: ModuleNotFoundError) -> click.Command:
    """Return a command that raises an error: a module of an extra is not installed."""

    def refuse(arguments: tuple[str, ...]) -> NoReturn:
        raise error

    return click.Command(
        name,
        callback=refuse,
        help=f"Not available: {error.name} is not installed.",
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
    )


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="synapse-replication")
def cli() -> None:
    """Replicate streams of rows between the instances of a homeserver."""


@common.command("main", "main -c homeserver.yaml", group=cli)
@common.config_option
@common.log_option
def main_command(config_paths: tuple[str, ...], log_json: bool) -> None:
    """Run a main process until SIGTERM or SIGINT. SIGHUP reloads the configuration."""
    _run(config_paths, "main", log_json)


@common.command(
    "worker", "worker -c homeserver.yaml -c workers/writer1.yaml", group=cli
)
@common.config_option
@common.log_option
def worker_command(config_paths: tuple[str, ...], log_json: bool) -> None:
    """Run a worker until SIGTERM or SIGINT. SIGHUP reloads the configuration."""
    _run(config_paths, "worker", log_json)


def _run(paths: Sequence[str], purpose: Purpose, log_json: bool) -> NoReturn:
    # The objects of the modules live as long as the process. By default, searching them
    # for garbage again and again takes a tenth of the CPU time of the start.
    thresholds = gc.get_threshold()
    gc.set_threshold(5000, 100)
    from synapse_replication.app.service_runner import run_service, start_logging
    from synapse_replication.app.supervision import (
        SupervisedProcess,
        SystemdNotifier,
        open_notify_socket,
    )
    from synapse_replication.config.process import load_config
    from synapse_replication.handlers.host_parts import ReactorClock
    from synapse_replication.instrumentation.log_file import LogFile

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_FILES:
        common.fail(
            f"synapse-replication: this process may open only {most} files; raise the "
            f"limit of open files (ulimit -n, or LimitNOFILE=) to {MIN_FILES} or more",
            1,
        )
    config = common.load_or_exit(paths, purpose)
    from synapse_replication.app.service import make_process

    notify = open_notify_socket(os.environ, os.getpid())
    set_log_level = start_logging(
        LogFile(sys.stderr), config.log_level, as_json=log_json
    )
    reactor = common.get_reactor()
    # attrs stores the text of each method that it generates, for debuggers: 0.6 MiB.
    linecache.clearcache()
    # Search them no more.
    gc.freeze()
    gc.set_threshold(*thresholds)

    def make() -> SupervisedProcess:
        process, systemd = make_process(config, reactor), None
        if notify is not None:
            systemd = SystemdNotifier(notify, ReactorClock(reactor), process.snapshot)
        return SupervisedProcess(
            process, config, lambda: load_config(paths, purpose), set_log_level, systemd
        )

    sys.exit(run_service(reactor, make))


@common.command(
    "check-config", "check-config -c homeserver.yaml -c workers/writer1.yaml", group=cli
)
@common.config_option
def check_config_command(config_paths: tuple[str, ...]) -> None:
    """Check the configuration and report its problems, without starting anything."""
    config = common.load_or_exit(config_paths, None)
    if problems := _find_startup_problems(config):
        common.exit_with_problems(ConfigError(problems))
    role = "main process" if config.is_main else f"worker {config.instance_name}"
    common.echo(f"{config.server_name}, {role}: the configuration is valid.")
    for name, value in describe(config):
        common.echo(f"  {name + ':':<9} {value}")
    for warning in config.warnings:
        common.echo(f"warning: {warning}", err=True)


def _find_startup_problems(config: ProcessConfig) -> list[ConfigProblem]:
    """Check the functions and the endpoints that the configuration names.

    :return: the problems that were found.
    """
    from synapse_replication.app.modules import load_factories
    from synapse_replication.config.endpoints import client_endpoint, server_endpoint

    reactor = common.get_reactor()
    checks: list[Callable[[], object]] = [lambda: load_factories(config)]
    for make, descriptions in (
        (client_endpoint, config.tcp_connect),
        (server_endpoint, config.tcp_listen),
    ):
        checks += [
            functools.partial(make, reactor, each, config) for each in descriptions
        ]
    problems: list[ConfigProblem] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    return problems


def check_streams(names: Sequence[str], config: ProcessConfig) -> None:
    """Check that streams of these names exist.

    :raises click.BadParameter: if a name is neither that of a standard stream nor that
        of a declared stream.
    """
    from synapse_replication.config.yaml_files import hint_for
    from synapse_replication.streams.standard.registry import STANDARD_STREAMS

    known = {*STANDARD_STREAMS, *config.writers}
    for name in names:
        if name not in known:
            otherwise = f"the streams are {', '.join(sorted(known))}"
            hint = hint_for(name, sorted(known), otherwise)
            raise click.BadParameter(
                f"there is no stream {name!r}; {hint}", param_hint="'--stream'"
            )


def describe(config: ProcessConfig) -> list[tuple[str, str]]:
    """Return pairs of a label and a text that say what a process would do."""
    facts = []
    if config.redis is not None:
        facts.append(("link", f"Redis at {config.redis.address}"))
    facts += [("link", f"direct TCP to {endpoint}") for endpoint in config.tcp_connect]
    facts += [("link", f"direct TCP on {endpoint}") for endpoint in config.tcp_listen]
    for listener in config.listeners:
        where = listener.path or ", ".join(
            f"{address}:{listener.port}" for address in listener.addresses
        )
        serves = "direct TCP" if listener.direct_tcp else "HTTP"
        resources = ", ".join(sorted(listener.resources))
        facts.append(("listens", f"{serves} on {where} {resources}".rstrip()))
    mine = [stream for stream in config.writers if config.writes(stream)]
    facts.append(("writes", ", ".join(mine) or "nothing"))
    facts.append(("follows", ", ".join(config.writers)))
    return facts


@common.command(
    "follow",
    "follow -c homeserver.yaml --stream events --command RDATA",
    "follow -c homeserver.yaml --json | jq .command",
    "follow -c homeserver.yaml --verify",
    group=cli,
)
@common.config_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per line.")
@click.option(
    "--stream",
    "streams",
    multiple=True,
    help="Print only this stream. May be repeated.",
)
@click.option(
    "--writer",
    "writers",
    multiple=True,
    help="Print only this writer. May be repeated.",
)
@click.option(
    "--command",
    "commands",
    multiple=True,
    type=click.Choice(tuple(COMMANDS), case_sensitive=False),
    help="Print only this command. May be repeated.",
)
@click.option(
    "--positions", is_flag=True, help="At the end, print each writer's position."
)
@click.option(
    "--verify",
    is_flag=True,
    help="Instead of lines, print rows that were committed and never announced, and at "
    "the end the totals. Needs a role of the database that may SELECT.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=5),
    default=30.0,
    show_default=True,
    help="With --verify: how long a committed row may wait for its announcement, in s.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    help="With --verify: the port of 127.0.0.1 that serves /metrics.",
)
def follow_command(
    config_paths: tuple[str, ...],
    as_json: bool,
    streams: tuple[str, ...],
    writers: tuple[str, ...],
    commands: tuple[str, ...],
    positions: bool,
    verify: bool,
    patience: float,
    metrics_port: int | None,
) -> None:
    """Print what a running deployment replicates, without taking part in it."""
    from synapse_replication.app.service_runner import run_service, start_logging
    from synapse_replication.cli.follow import Filters, make_follower

    config = common.load_or_exit(config_paths, "follow")
    check_streams(streams, config)
    start_logging(sys.stderr)
    reactor = common.get_reactor()
    if verify:
        from synapse_replication.cli.verify import make_meter

        if writers or commands or positions:
            raise click.UsageError(
                "--verify takes --stream, but no --writer, --command or --positions"
            )
        make = functools.partial(
            make_meter,
            streams=streams,
            patience=patience,
            metrics_port=metrics_port,
        )
    else:
        filters = Filters(frozenset(streams), frozenset(writers), frozenset(commands))
        make = functools.partial(
            make_follower, filters=filters, with_positions=positions
        )
    sys.exit(run_service(reactor, lambda: make(config, reactor, as_json=as_json)))


def main() -> NoReturn:
    """Run the command line, and exit with its status."""
    common.prepare_output()
    try:
        cli(standalone_mode=True)
    except (ReplicationError, OSError) as error:
        # For instance, a file cannot be read, or the output cannot be written.
        common.fail(f"synapse-replication: {error}", 1)
    sys.exit(0)


if __name__ == "__main__":
    main()
