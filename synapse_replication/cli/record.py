"""``synapse-replication record``: records traffic without publishing anything.

The recordings are an input of the pipeline. They preserve data that no table retains:
typing, superseded presence, POSITION. USER_IP is not recorded. When a connection is
lost, the current file is closed, and the next line begins a new file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from twisted.internet.task import LoopingCall

from synapse_replication.app.passive import Follower
from synapse_replication.app.service_runner import run_service, start_logging
from synapse_replication.cli import common
from synapse_replication.config.process import ProcessConfig
from synapse_replication.handlers.events import LinkDown
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.instrumentation.log_file import LogFile
from synapse_replication.recordings.writer import RecordingFiles, RecordingWriteError
from synapse_replication.transport.reactor import IReactor


class _LossObserver(ReplicationObserver):
    """Calls a function when a connection is lost."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    @handles(LinkDown)
    def _link_down(self, event: LinkDown) -> None:
        self._act()


def make_recorder(
    config: ProcessConfig, reactor: IReactor, files: RecordingFiles
) -> Follower:
    """Return a service that records the traffic of a deployment.

    Its Deferred ``started`` fails if a recording cannot be written, for instance
    because the disk is full.
    """
    failed = False

    def guarded(act: Callable[..., object]) -> Callable[..., None]:
        def do(*args: Any) -> None:
            nonlocal failed
            if failed:
                return
            try:
                act(*args)
            except RecordingWriteError as error:
                failed = True
                recorder.fail(error)

        return do

    ticking = LoopingCall(guarded(files.tick))
    ticking.clock = reactor

    def finish() -> None:
        ticking.stop()
        if not failed:
            files.close()

    recorder = Follower(
        config,
        reactor,
        "record",
        guarded(files.write),
        finish,
        lambda: ticking.start(1.0, now=False),
        observers=[_LossObserver(guarded(files.roll))],
    )
    return recorder


@common.command("record", "record -c homeserver.yaml --out recordings --gzip")
@common.config_option
@click.option(
    "--out",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder for the recordings; created if it is missing.",
)
@click.option("--gzip", "compressed", is_flag=True, help="Compress the recordings.")
@click.option(
    "--roll-mib",
    type=click.FloatRange(min=0, min_open=True),
    default=64.0,
    show_default=True,
    help="Begin a new file after this many MiB of uncompressed lines.",
)
@click.option(
    "--roll-seconds",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    help="Begin a new file after this many seconds.",
)
@common.log_option
def record_command(
    config_paths: tuple[str, ...], roll_mib: float, log_json: bool, **options: Any
) -> None:
    """Record the traffic of a running deployment, except USER_IP; publish nothing."""
    config = common.load_or_exit(config_paths, "follow")
    start_logging(LogFile(sys.stderr), as_json=log_json)
    reactor = common.get_reactor()

    def make() -> Follower:
        files = RecordingFiles(
            roll_bytes=max(1, int(roll_mib * 2**20)),
            now=time.monotonic,
            wall=time.time,
            **options,
        )
        return make_recorder(config, reactor, files)

    sys.exit(run_service(reactor, make))
