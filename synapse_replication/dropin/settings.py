"""Settings of a homeserver's process, in environment variables.

``synapse-replication exec`` sets them.
"""

from __future__ import annotations

import os

from synapse_replication.errors import StreamConfigurationError
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE

#: The environment variable with the maximum number of ids by which a plausible position
#: may exceed the last value of its sequence.
DISTANCE = "SYNAPSE_REPLICATION_PLAUSIBLE_DISTANCE"


def whole_number(variable: str, default: int) -> int:
    """Return the number in an environment variable; ``default`` if it is not set.

    :raises StreamConfigurationError: if the value is not a whole number of 0 or more.
    """
    value = os.environ.get(variable, str(default))
    if not (value.isascii() and value.isdigit()):
        raise StreamConfigurationError(
            f"{variable} is {value!r}: set it to a whole number of 0 or more, or unset "
            f"it to use the default, {default}"
        )
    return int(value)


def plausible_distance() -> int:
    """Return how far a plausible position may exceed its sequence's last value, in ids.

    :raises StreamConfigurationError: if the environment variable is not a whole number
        of 0 or more.
    """
    return whole_number(DISTANCE, PLAUSIBLE_DISTANCE)
