"""Prepares a process to run a module of Synapse on this package.

Theory of operation: before the module is run as ``__main__``, the selected names of
``table.py`` are replaced, all or none, so that the module and its imports use the
replacements. The installed Synapse is compared with the table first; if it differs,
nothing is started.
"""

from __future__ import annotations

import importlib.metadata
import linecache
import os
import sys
from collections.abc import Iterable, Sequence

from synapse_replication.dropin import announcement
from synapse_replication.dropin.monitoring import load_hooks
from synapse_replication.dropin.settings import DropInSettings
from synapse_replication.dropin.substitution import (
    Substitution,
    SubstitutionError,
    substitute,
)
from synapse_replication.dropin.table import PARTS, PROVEN_VERSIONS, SUBSTITUTIONS

#: The distribution that the table describes.
DISTRIBUTION = "matrix-synapse"


def choose(only: Iterable[str], excepted: Iterable[str]) -> tuple[Substitution, ...]:
    """Return the substitutions of the selected parts.

    :param only: the parts to replace; all if empty.
    :param excepted: the parts that are not replaced.
    :raises SubstitutionError: if a part does not exist, or no part is selected.
    """
    only, excepted = set(only), set(excepted)
    if unknown := sorted((only | excepted) - set(PARTS)):
        known = ", ".join(PARTS)
        raise SubstitutionError(
            [f"there is no part {', '.join(unknown)}; the parts are {known}"]
        )
    parts = (only or set(PARTS)) - excepted
    if not parts:
        raise SubstitutionError(["every part is excluded: nothing would be replaced"])
    return tuple(known for known in SUBSTITUTIONS if known.part in parts)


def installed_version() -> str | None:
    """Return the installed version of Synapse; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_problem(version: str | None) -> str | None:
    """Return why a version counts as untested; ``None`` if it was tested."""
    proven = ", ".join(PROVEN_VERSIONS)
    if version is None:
        return f"{DISTRIBUTION} is not installed in the environment of {sys.executable}"
    if version not in PROVEN_VERSIONS:
        return (
            f"{DISTRIBUTION} {version} was not tested; the tested versions are {proven}"
        )
    return None


def check_version(*, strict: bool) -> str | None:
    """Compare the installed version with the tested ones.

    :param strict: whether to reject a version that was not tested.
    :return: a warning if the version was not tested; otherwise ``None``.
    :raises SubstitutionError: if Synapse is not installed, or its version is rejected.
    """
    installed = installed_version()
    problem = version_problem(installed)
    if problem is not None and (strict or installed is None):
        raise SubstitutionError([problem])
    return problem


def prepare(
    substitutions: Sequence[Substitution],
    module: str,
    arguments: Sequence[str],
    settings: DropInSettings,
) -> None:
    """Apply the substitutions, and prepare the environment of the module.

    :param substitutions: the names to replace.
    :param module: the module to run, as ``sys.argv[0]``.
    :param arguments: the arguments of the module, as ``sys.argv[1:]``.
    :raises SubstitutionError: if the installed Synapse differs from the table.
    :raises HooksNotFoundError: if a function that subscribes to hooks cannot be
        imported.
    """
    substitute(substitutions)
    _drop_generated_source()
    installed = installed_version()
    parts = dict.fromkeys(known.part for known in substitutions)
    announcement.prepare(list(parts), installed, version_problem(installed))
    # Put the working directory first, as `python -m` does.
    sys.path.insert(0, os.getcwd())
    load_hooks(settings.hooks)
    os.environ.update(settings.to_environ())
    sys.argv = [module, *arguments]


def _drop_generated_source() -> None:
    """Free the source of the methods that attrs has generated: about 0.6 MB.

    It is kept for tracebacks, which then show these methods without their lines.
    """
    for name in list(linecache.cache):
        if name.startswith("<attrs generated ") and "synapse_replication." in name:
            del linecache.cache[name]


def describe_substitutions(substitutions: Sequence[Substitution]) -> str:
    """Return a text with the replaced names, and the tested and installed versions."""
    width = max(len(known.part) for known in substitutions)
    lines = [
        f"{known.part:<{width}}  {known}\n{'':<{width}}    -> {known.replacement}"
        for known in substitutions
    ]
    found = installed_version() or "none"
    return "\n".join(
        [
            *lines,
            "",
            f"Tested with {DISTRIBUTION} {', '.join(PROVEN_VERSIONS)}; "
            f"installed here: {found}.",
        ]
    )
