"""The kinds of findings of an audit: what each means, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs


class Severity(enum.Enum):
    """The severity of a finding, from the worst to the least."""

    #: Certainly a fault.
    ERROR = "error"
    #: A fault that did no harm, or one that cannot be proved.
    WARNING = "warning"
    #: Occurs in healthy deployments, too; helps to interpret the other findings.
    INFO = "info"


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of findings. The texts are reStructuredText, for the manual.

    :ivar remedy: what to do about such a finding.
    """

    severity: Severity
    meaning: str
    remedy: str


#: All kinds, in the manual's order. The statements of ``checks.sql`` name them.
KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "announced_absent": Kind(
            severity=Severity.ERROR,
            meaning=(
                "A POSITION states that its writer has no rows in a range, but the "
                "tables have a row of the writer in it, which no recording has: all "
                "readers have lost it. The evidence has file, line, tables and row. "
                "For idempotent streams (``caches``), the recording must continue for "
                "a minute after the POSITION."
            ),
            remedy=(
                "Restart the readers, which then reload their caches from the "
                "database, and check the writer."
            ),
        ),
        "row_out_of_order": Kind(
            severity=Severity.ERROR,
            meaning=(
                "A row was sent after a newer row of its writer, or after a POSITION "
                "beyond it. Readers discard it."
            ),
            remedy=(
                "Restart the readers, which then reload their caches from the "
                "database, and check the writer."
            ),
        ),
        "id_of_two_writers": Kind(
            severity=Severity.ERROR,
            meaning=(
                "Rows of two writers in tables or archive have the same id: the "
                "sequence allocated it twice. See ``sequence_behind``."
            ),
            remedy=(
                "Stop all writers, run ``positions repair``, and restart the readers. "
                "Rows of both writers remain."
            ),
        ),
        "sequence_behind": Kind(
            severity=Severity.ERROR,
            meaning="A sequence is behind a table; ids will be allocated twice.",
            remedy="Stop all writers, run ``positions repair``.",
        ),
        "position_ahead": Kind(
            severity=Severity.ERROR,
            meaning=(
                "A stored position is ahead of the sequence: the next rows would be "
                "below it, although it states that all rows up to it are complete. A "
                "position that is only ahead of the *rows* is normal."
            ),
            remedy="Stop all writers, run ``positions repair``.",
        ),
        "token_ahead": Kind(
            severity=Severity.ERROR,
            meaning=(
                "A recording or the archive has a token that the sequence has not "
                "allocated: the database was restored from an older copy, or failed "
                "over to a standby that was behind, or is a different one."
            ),
            remedy=(
                "Check that this is the database of the recording or archive. If it "
                "was restored, restart all processes, and archive again to a new "
                "folder."
            ),
        ),
        "position_wrong_sign": Kind(
            severity=Severity.ERROR,
            meaning=(
                "A position has the wrong sign: the ids of ``backfill`` are negative, "
                "all others positive."
            ),
            remedy="Run ``positions repair``.",
        ),
        "positions_missing": Kind(
            severity=Severity.ERROR,
            meaning="The table ``stream_positions`` is missing.",
            remedy="Run ``pipeline bootstrap``.",
        ),
        "archive_damaged": Kind(
            severity=Severity.ERROR,
            meaning=(
                "A file of the archive is missing, truncated, or has changed bytes. "
                "The rest of the archive is audited without it. The message has the "
                "table, file and tokens."
            ),
            remedy=(
                "Restore the file from a backup, or run ``pipeline archive --repair``."
            ),
        ),
        "row_twice_in_archive": Kind(
            severity=Severity.ERROR,
            meaning="The archive is damaged: another program wrote to it.",
            remedy="Archive again to a new folder.",
        ),
        "command_twice_in_archive": Kind(
            severity=Severity.ERROR,
            meaning="The same for a line of a recording.",
            remedy="Archive again to a new folder.",
        ),
        "row_not_archived": Kind(
            severity=Severity.ERROR,
            meaning=(
                "The archive has older and newer rows of the writer but lacks this "
                "one, which was not purged."
            ),
            remedy="Archive again to a new folder.",
        ),
        "row_twice_on_wire": Kind(
            severity=Severity.WARNING,
            meaning="A writer sent a row again. Readers discard it.",
            remedy="Check for a second process with the same name.",
        ),
        "positions_not_unique": Kind(
            severity=Severity.WARNING,
            meaning="``stream_positions`` lacks its unique index.",
            remedy="Run ``positions repair``.",
        ),
        "unknown_writer": Kind(
            severity=Severity.WARNING,
            meaning=(
                "A position belongs to an instance that the configuration does not "
                "name, and delays others."
            ),
            remedy="Run ``positions repair``, or start the homeserver.",
        ),
        "recording_damaged": Kind(
            severity=Severity.WARNING,
            meaning="Lines of a recording are not records. Their content is unknown.",
            remedy=(
                "Check the disk of the recorder; other recordings of the time may have"
                " the lines."
            ),
        ),
        "recording_cut_off": Kind(
            severity=Severity.INFO,
            meaning=(
                "The last line of a recording is incomplete: it is still being "
                "written, or its recorder was killed."
            ),
            remedy="Nothing.",
        ),
        "late_invalidation": Kind(
            severity=Severity.INFO,
            meaning=(
                "Rows of ``caches`` were late or repeated; readers accept this for "
                "this stream."
            ),
            remedy="Nothing.",
        ),
        "row_not_seen": Kind(
            severity=Severity.INFO,
            meaning=(
                "A row is missing between two others of its writer in a recording. If "
                "the recorder was connected continuously (a file of ``record`` is one "
                "connection), the row was lost in transit; other readers may have "
                "missed it, too."
            ),
            remedy=(
                "If the recorder was connected continuously, restart the readers, "
                "which then reload their caches."
            ),
        ),
        "id_without_row": Kind(
            severity=Severity.INFO,
            meaning=(
                "No writer has a row with this id: it was rolled back, replaced by a "
                "newer row, deleted, or lost. The finding has its neighbours; the "
                "newest 1000 gaps of a stream are listed, the others summed up."
            ),
            remedy=(
                "Nothing. With ``--archive``, an audit knows the replaced rows that "
                "were archived, and has fewer of these notes."
            ),
        ),
        "row_gone": Kind(
            severity=Severity.INFO,
            meaning=(
                "Rows that were sent or archived are no longer in the tables: they "
                "were replaced, purged or deleted."
            ),
            remedy="Nothing.",
        ),
        "stream_reset": Kind(
            severity=Severity.INFO,
            meaning=(
                "A writer reset a stream: ``typing`` after a restart. Other streams "
                "may be reset to their stored positions."
            ),
            remedy="Nothing.",
        ),
    }
)
