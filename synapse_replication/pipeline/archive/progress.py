"""The progress display of the archive job: a bar on a terminal, lines in a log."""

from __future__ import annotations

import attrs

from synapse_replication.pipeline.progress import Display


@attrs.define
class Numbers:
    """The totals since the start of the job, and its current lag and rate.

    :ivar rows: archived rows of streams.
    :ivar skipped: ids whose rows cannot be read because of their content.
    :ivar commands: archived commands of recordings.
    :ivar batches: committed batches.
    :ivar recordings: archived recordings.
    :ivar compacted_files: small files that were merged into larger ones.
    :ivar behind: the number of ids by which the archive is behind the database;
        ``None`` if unknown.
    :ivar rows_per_second: the rate of the last batch with rows.
    """

    rows: int = 0
    skipped: int = 0
    commands: int = 0
    batches: int = 0
    recordings: int = 0
    compacted_files: int = 0
    behind: int | None = None
    rows_per_second: float = 0.0


class ArchiveProgress(Display):
    """The display. Its bar shows the part of the rows that is archived."""

    def show(self, numbers: Numbers, event: str) -> None:
        """Show the totals and the last event.

        :param event: the last event, in a few words.
        """
        text, behind = _total(numbers), numbers.behind
        total = 0 if behind is None else numbers.rows + behind
        self.update(f"{event}; {text}", text, event, numbers.rows, total)


def _total(numbers: Numbers) -> str:
    parts = [f"{numbers.rows:,} rows"]
    if numbers.rows_per_second:
        parts.append(f"{numbers.rows_per_second:,.0f} rows/s")
    if numbers.skipped:
        parts.append(f"{numbers.skipped:,} ids skipped")
    if numbers.commands:
        parts.append(f"{numbers.commands:,} commands")
    if numbers.behind is not None:
        parts.append(f"{numbers.behind:,} ids behind")
    return ", ".join(parts)
