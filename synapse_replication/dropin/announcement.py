"""What ``exec`` replaced, written once to the host's own log.

The host sets its log up after ``exec`` did its work; so the lines are prepared first,
and written when the first part of ours is in use.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from synapse_replication import __version__

__all__ = ["prepare", "write"]

_LOGGER = logging.getLogger("synapse_replication")

_lines: list[tuple[int, str]] = []


def prepare(parts: Sequence[str], version: str | None, problem: str | None) -> None:
    """Prepare the lines of this process.

    :param parts: what was replaced.
    :param version: of the host.
    :param problem: why that version may not be fit; ``None`` if it was tried.
    """
    _lines[:] = [
        (
            logging.INFO,
            f"Replication of this process is synapse_replication {__version__} instead "
            f"of Synapse's own; parts: {', '.join(parts)}; Synapse {version}",
        )
    ]
    if problem is not None:
        _lines.append(
            (
                logging.WARNING,
                f"{problem}. It may work as well; if replication misbehaves, start "
                "this process without synapse_replication, or install a version "
                "that was tried",
            )
        )


def write() -> None:
    """Write the lines, unless that was done."""
    lines, _lines[:] = _lines[:], []
    for level, text in lines:
        _LOGGER.log(level, "%s", text)
