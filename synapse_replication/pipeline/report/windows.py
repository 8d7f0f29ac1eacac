"""The lengths of the intervals for which a plot shows one value each."""

from __future__ import annotations

import datetime
from typing import Final

MINUTE: Final = 60
HOUR: Final = 3600
_DAY: Final = 86_400

#: The most windows into which :func:`choose_window` divides a span, unless the span is
#: too long for all lengths.
MAX_WINDOWS: Final = 120

#: The lengths of windows to choose from, in s. Each is a multiple of all units that are
#: not longer; see :data:`_UNITS`.
_WINDOWS: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 14, 30, 90, 365)),
)

#: The units of these lengths, longest first.
_UNITS: Final = (_DAY, HOUR, MINUTE, 1)


def choose_window(
    first: datetime.datetime | None, last: datetime.datetime | None
) -> int:
    """Return the shortest window length, in s, with at most MAX_WINDOWS windows.

    If the span of the times is too long for all lengths, return the longest one.
    """
    span = (last - first).total_seconds() if first and last else 0
    fitting = (window for window in _WINDOWS if span / window <= MAX_WINDOWS)
    return next(fitting, _WINDOWS[-1])


def unit_of_windows(first: datetime.datetime, last: datetime.datetime) -> int:
    """Return the unit of the window that is chosen for times that include these, in s.

    The window is a multiple of the unit, however much longer the whole span is.
    """
    window = choose_window(first, last)
    return next(unit for unit in _UNITS if window % unit == 0)
