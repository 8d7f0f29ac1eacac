"""Log lines that name the replaced parts, written once to the host's log.

The host sets up its log after ``synapse-replication exec`` has replaced the parts. The
lines are therefore prepared first, and written when the monitoring of a homeserver is
created.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from synapse_replication import __version__

_LOGGER = logging.getLogger("synapse_replication")

_lines: list[tuple[int, str]] = []


def prepare(parts: Sequence[str], version: str | None, problem: str | None) -> None:
    """Prepare the lines of this process.

    :param parts: the replaced parts.
    :param version: the version of the host.
    :param problem: why that version may not work; ``None`` if it was tested.
    """
    _lines[:] = [
        (
            logging.INFO,
            f"This process replicates with synapse_replication {__version__} instead "
            f"of Synapse's own code; replaced parts: {', '.join(parts)}; "
            f"Synapse {version}",
        )
    ]
    if problem is not None:
        _lines.append(
            (
                logging.WARNING,
                f"{problem}. Replication may still work; if it does not, start this "
                "process without synapse_replication, or install a tested version",
            )
        )


def write() -> None:
    """Write the lines, unless they have been written."""
    lines, _lines[:] = _lines[:], []
    for level, text in lines:
        _LOGGER.log(level, "%s", text)
