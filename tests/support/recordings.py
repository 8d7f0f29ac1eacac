"""The recording of a real deployment, whose beginning the package ships; a report."""

from __future__ import annotations

from pathlib import Path

from synapse_replication.handlers.events import DiscardReason
from synapse_replication.recordings.replay import Gap, ReplayReport

#: The complete traffic: 21,168 commands, 10,159 of them rows.
FULL_RECORDING = Path(__file__).parent / "data" / "startup_drive.jsonl.xz"


def make_report() -> ReplayReport:
    """Return the report of a replay, with entries of several kinds."""
    report = ReplayReport(lines=7)
    report.commands["RDATA"] = 5
    report.last_position["typing", "w"] = 3
    report.discarded[DiscardReason.UNDECODABLE]["typing"] = 2
    report.discarded[DiscardReason.OLD_TOKEN]["events"] = 1
    report.gaps.append(Gap("events", "p1", 5, 9))
    report.add_unparsable(4, "cannot parse")
    return report
