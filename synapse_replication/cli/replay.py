"""``synapse-replication replay``: summarises a recording of traffic."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from synapse_replication.cli.common import command
from synapse_replication.recordings.reader import read_recording
from synapse_replication.recordings.replay import replay_records
from synapse_replication.recordings.replay_report import describe


@command("replay", "replay recordings/0001.jsonl.gz")
@click.argument(
    "recording",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def replay_command(recording: Path, as_json: bool) -> None:
    """Replay recorded traffic through the parser and the handler; print a summary.

    FILE has one JSON object per line, {"t": ..., "channel": ..., "line": ...}, and may
    be compressed with gzip or xz.

    Exit status: 0 if every line was parsed, every discard has an expected reason, and
    nothing else failed; otherwise 1.
    """
    report = replay_records(read_recording(recording))
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        click.echo("\n".join(describe(report)))
    sys.exit(0 if report.is_clean else 1)
