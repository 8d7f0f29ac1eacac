"""``synapse-replication monitor``: monitors a deployment without taking part in it."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from synapse_replication.cli import common
from synapse_replication.errors import ConfigError

#: The default port of the page.
DEFAULT_PORT = 9190


@common.command(
    "monitor",
    "monitor -c homeserver.yaml",
    "monitor -c homeserver.yaml -c workers/generic1.yaml --port 9200",
)
@common.config_option
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="The port of /status, /metrics and /ready.",
)
@click.option(
    "--address",
    default="127.0.0.1",
    show_default=True,
    help="The address on which to serve them.",
)
def monitor_command(config_paths: tuple[str, ...], port: int, address: str) -> NoReturn:
    """Monitor a deployment, stock or not, without publishing anything."""
    from synapse_replication.app.monitor import Monitor
    from synapse_replication.app.service_runner import run_service, start_logging
    from synapse_replication.instrumentation.log_file import LogFile

    config = common.load_or_exit(config_paths, "follow")
    if not config.instances:
        click.echo(
            "warning: instance_map is empty, so no instance can be asked whether it "
            "runs",
            err=True,
        )
    start_logging(LogFile(sys.stderr), config.log_level)
    reactor = common.get_reactor()
    try:
        monitor = Monitor(config, reactor, host=address, port=port)
    except ConfigError as error:
        common.exit_with_problems(error)
    sys.exit(run_service(reactor, lambda: monitor))
