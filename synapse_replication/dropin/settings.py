"""Settings of a homeserver's process, in environment variables.

``synapse-replication exec`` sets them, so that processes that the module starts inherit
them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from synapse_replication.errors import StreamConfigurationError
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.writer_positions import PLAUSIBLE_DISTANCE


def variable(name: str) -> str:
    """Return the environment variable of an attribute of :class:`DropInSettings`."""
    return f"SYNAPSE_REPLICATION_{name.upper()}"


class DropInSettings(Struct, frozen=True):
    """The settings of this package in a homeserver's process.

    :ivar extension: whether to use the extension.
    :ivar backlog_rows: the maximum number of rows in the backlog of each stream.
    :ivar backlog_bytes: the maximum size of the backlog of each stream, in bytes.
    :ivar plausible_distance: the maximum number of ids by which a plausible position
        may exceed the last value of its sequence.
    :ivar position_check_seconds: the mean time between two reads of the stored
        positions of all writers, in s; 0 to read none.
    :ivar writer_lock: whether a process that writes streams holds a lock for its name.
    :ivar hooks: the dotted names of functions, separated by commas. Each is called with
        the arguments ``host, config`` and subscribes to hooks.
    :ivar tracing_endpoint: the URL of a collector of spans (OTLP over HTTP); empty for
        none.
    """

    extension: bool = True
    backlog_rows: int = BacklogOptions().max_rows
    backlog_bytes: int = BacklogOptions().max_bytes
    plausible_distance: int = PLAUSIBLE_DISTANCE
    position_check_seconds: int = 5
    writer_lock: bool = True
    hooks: str = ""
    tracing_endpoint: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> DropInSettings:
        """Return the settings of a process; a variable that is not set has its default.

        :raises StreamConfigurationError: if a number is not a whole number of 0 or
            more.
        """
        settings = cls()
        found: dict[str, Any] = {}
        for name, default in asdict(settings).items():
            text = environ.get(variable(name))
            if text is None:
                continue
            if isinstance(default, bool):
                found[name] = text != "false"
            elif isinstance(default, int):
                found[name] = _whole_number(name, text, default)
            else:
                found[name] = text
        return replace(settings, **found)

    def to_environ(self) -> dict[str, str]:
        """Return the environment variables of these settings."""
        return {
            variable(name): str(value).lower()
            if isinstance(value, bool)
            else str(value)
            for name, value in asdict(self).items()
        }


def own_settings() -> DropInSettings:
    """Return the settings of this process; see :meth:`DropInSettings.from_environ`."""
    return DropInSettings.from_environ(os.environ)


def _whole_number(name: str, text: str, default: int) -> int:
    if not (text.isascii() and text.isdigit()):
        raise StreamConfigurationError(
            f"{variable(name)} is {text!r}: set it to a whole number of 0 or more, or "
            f"unset it to use the default, {default}"
        )
    return int(text)
