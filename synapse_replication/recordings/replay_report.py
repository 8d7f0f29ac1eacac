"""The report on a replayed recording, as text and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import attrs
import msgspec

from synapse_replication.handlers.events import DiscardReason

_Key: TypeAlias = tuple[str, str]

#: The maximum number of unparsable lines that are listed; others are only counted.
_MAX_UNPARSABLE = 1000
#: The reasons for which discards are expected, with an explanation of each. A discard
#: for another reason may lose data.
EXPLANATIONS: Mapping[DiscardReason, str] = {
    DiscardReason.OLD_TOKEN: "sent again, at or below the position of its writer",
    DiscardReason.REDUNDANT_POSITION: "repeats a known position",
    DiscardReason.REPEATED: "repeats the known state of a user",
    DiscardReason.UNKNOWN_STREAM: "a stream that this version does not know",
}


@attrs.frozen
class Unparsable:
    """A line that is not a record, or whose command or row cannot be parsed.

    :ivar line_number: its line number in the recording, from 1.
    :ivar error: why it cannot be parsed.
    """

    line_number: int
    error: str


@attrs.frozen
class Gap:
    """A range of tokens whose rows may be missing, according to a later POSITION.

    :ivar after: the writer's last position before the range.
    :ivar up_to: the last token of the range.
    """

    stream: str
    writer: str
    after: int
    up_to: int


@attrs.define
class ReplayReport:
    """The report on a recording.

    :ivar lines: the number of commands, including those that cannot be parsed; lines
        that are not records are not included.
    :ivar commands: lines by their first word.
    :ivar rdata_rows: rows by stream.
    :ivar batches: finished batches of more than one row, by stream.
    :ivar rdata_at_or_below_position: rows at or below the position that their
        writer had reached, by stream.
    :ivar resets: how often a writer's position moved back, by stream.
    :ivar last_position: the last position by stream and writer.
    :ivar discarded: rows, positions and repeated commands that the handler discarded,
        by the reason, then by the name of the stream or command.
    :ivar extra_fields: rows with unknown additional fields, by stream.
    :ivar gaps: the ranges in which rows may be missing.
    :ivar unparsable_lines: the number of lines that are not records, or whose command
        or row cannot be parsed.
    :ivar unparsable: the first thousand lines that cannot be parsed.
    :ivar failures: other failures, by their text.
    """

    lines: int = 0
    commands: Counter[str] = attrs.Factory(Counter)
    rdata_rows: Counter[str] = attrs.Factory(Counter)
    batches: Counter[str] = attrs.Factory(Counter)
    rdata_at_or_below_position: Counter[str] = attrs.Factory(Counter)
    resets: Counter[str] = attrs.Factory(Counter)
    last_position: dict[_Key, int] = attrs.Factory(dict)
    discarded: defaultdict[DiscardReason, Counter[str]] = attrs.Factory(
        lambda: defaultdict(Counter)
    )
    extra_fields: Counter[str] = attrs.Factory(Counter)
    gaps: list[Gap] = attrs.Factory(list)
    unparsable_lines: int = 0
    unparsable: list[Unparsable] = attrs.Factory(list)
    failures: Counter[str] = attrs.Factory(Counter)

    @property
    def is_clean(self) -> bool:
        """Whether nothing failed, and every discard has an expected reason."""
        return not (
            self.unparsable_lines
            or self.failures
            or any(reason not in EXPLANATIONS for reason in self.discarded)
        )

    def add_unparsable(self, number: int, error: str) -> None:
        """Record a line that cannot be parsed."""
        self.unparsable_lines += 1
        if len(self.unparsable) < _MAX_UNPARSABLE:
            self.unparsable.append(Unparsable(number, error))

    def to_json(self) -> dict[str, Any]:
        """Return the report as values that JSON can represent."""
        value: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        value["last_position"] = {
            " ".join(key): token for key, token in value["last_position"].items()
        }
        return value


def describe(report: ReplayReport) -> Iterator[str]:
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
            notes[f"{reason.value} {name}"] = EXPLANATIONS.get(reason, "NOT EXPLAINED")
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
        for each in report.unparsable:
            yield f"  line {each.line_number}: {each.error}"


def _table(
    title: str, counts: Mapping[str, int], notes: Mapping[str, str] | None = None
) -> Iterator[str]:
    yield ""
    if not counts:
        yield f"{title}: none"
        return
    yield f"{title}:"
    width = max(map(len, counts))
    for name, count in sorted(counts.items()):
        note = f"  {notes[name]}" if notes else ""
        yield f"  {name:<{width}} {count:>9}{note}"
