"""``synapse-replication replay``: summarises a recording of traffic."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from synapse_replication.cli.common import command
from synapse_replication.recordings import replay
from synapse_replication.recordings.reader import read_recording
from synapse_replication.text import printable

#: The most lines of a table of the summary.
_MAX_SHOWN = 50


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
    report = replay.replay_records(read_recording(recording))
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        click.echo("\n".join(describe(report)))
    sys.exit(0 if report.is_clean else 1)


def describe(report: replay.ReplayReport) -> Iterator[str]:
    """Yield the lines of a report as text."""
    yield f"{report.lines} lines"
    yield from _table("Commands", report.commands)
    yield from _table("Rows by stream", report.rdata_rows)
    yield from _table("Batches of several rows, by stream", report.batches)
    yield from _table(
        "Rows at or below the position of their writer, by stream",
        report.rdata_at_or_below_position,
    )
    yield from _table("Resets of a writer's position, by stream", report.resets)
    yield from _table(
        "Last position by stream and writer",
        {f"{name} {writer}": at for (name, writer), at in report.last_position.items()},
    )
    discarded, notes = {}, {}
    for reason, counts in report.discarded.items():
        for name, count in counts.items():
            discarded[f"{reason.value} {name}"] = count
            notes[f"{reason.value} {name}"] = replay.EXPLANATIONS.get(
                reason, "NOT EXPLAINED"
            )
    yield from _table("Discarded by the handler", discarded, notes)
    yield from _table("Rows with unknown additional fields", report.extra_fields)
    yield from _table(
        "Possible gaps in the recording, by stream and writer",
        Counter(f"{gap.stream} {gap.writer}" for gap in report.gaps),
    )
    yield from _table("Failures", report.failures)
    if report.unparsable_lines:
        yield ""
        yield f"Unparsable lines: {report.unparsable_lines}"
        for each in report.unparsable[:_MAX_SHOWN]:
            yield f"  line {each.line_number}: {printable(each.error)}"
        if report.unparsable_lines > _MAX_SHOWN:
            yield f"  and {report.unparsable_lines - _MAX_SHOWN} more"


def _table(
    title: str, counts: Mapping[str, int], notes: Mapping[str, str] | None = None
) -> Iterator[str]:
    yield ""
    if not counts:
        yield f"{title}: none"
        return
    yield f"{title}:"
    shown = sorted(sorted(counts, key=lambda name: -counts[name])[:_MAX_SHOWN])
    texts = {name: printable(name) for name in shown}
    width = max(map(len, texts.values()))
    for name, text in texts.items():
        note = f"  {notes[name]}" if notes else ""
        yield f"  {text:<{width}} {counts[name]:>9}{note}"
    if len(counts) > len(shown):
        yield f"  and {len(counts) - len(shown)} more"
