"""Settings of a homeserver's process, in environment variables.

``synapse-replication exec`` sets them, so that processes that the module starts inherit
them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs

from synapse_replication.config.shared_options import SharedOptions
from synapse_replication.errors import StreamConfigurationError
from synapse_replication.options import (
    InvalidValueError,
    Leaf,
    build,
    leaves,
    option,
    to_scalar,
)


@attrs.frozen(kw_only=True)
class DropInSettings(SharedOptions):
    """The settings of this package in a homeserver's process.

    :ivar hooks: the dotted names of functions, separated by commas. Each is called with
        the arguments ``host, config`` and subscribes to hooks.
    """

    hooks: str = attrs.field(default="", metadata=option())


@cache
def setting_leaves() -> tuple[Leaf, ...]:
    """Return the options of :class:`DropInSettings` that a variable can set."""
    scalars = (bool, int, float, str)
    return tuple(leaf for leaf in leaves(DropInSettings) if leaf.type in scalars)


def from_environ(environ: Mapping[str, str]) -> DropInSettings:
    """Return the settings of a process; a variable that is not set has its default.

    An empty variable of an option that has no default counts as not set.

    :raises StreamConfigurationError: if the value of a variable is invalid, or spans
        cannot be exported.
    """
    values = {}
    for leaf in setting_leaves():
        text = environ.get(leaf.variable)
        if text is not None and (text or leaf.default is not attrs.NOTHING):
            values[leaf.key] = _parse(leaf, text)
    settings = DropInSettings(**build(DropInSettings, values))
    if settings.tracing is not None and (why := settings.tracing.why_unusable()):
        problem, hint = why
        raise StreamConfigurationError(
            f"{variable('tracing_endpoint')} cannot be used: {problem}; {hint}"
        )
    return settings


def to_environ(values: Mapping[str, object]) -> dict[str, str]:
    """Return environment variables with values, which are given by variable."""
    return {
        variable: str(value).lower() if isinstance(value, bool) else str(value)
        for variable, value in values.items()
    }


def own_settings() -> DropInSettings:
    """Return the settings of this process; see :func:`from_environ`."""
    return from_environ(os.environ)


def variable(name: str) -> str:
    """Return the environment variable whose name ends with ``name``."""
    return f"SYNAPSE_REPLICATION_{name.upper()}"


def _parse(leaf: Leaf, text: str) -> Any:
    try:
        return leaf.option.checked(to_scalar(leaf.type, text))
    except InvalidValueError as error:
        default = "" if leaf.default is attrs.NOTHING else f", {leaf.default}"
        raise StreamConfigurationError(
            f"{leaf.variable} is {text!r}: {error.problem}; {error.hint}, or unset it "
            f"to use the default{default}"
        ) from None
