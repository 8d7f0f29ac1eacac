"""Runs a module of Synapse on this package: ``python -m synapse_replication.dropin``.

The arguments are the parts to replace, separated by commas, the module and its own
arguments. ``synapse-replication exec`` starts this program, and passes the settings in
the environment.

Theory of operation: before the module is run as ``__main__``, the selected names of
``replaced_names.py`` are replaced, all or none, so that the module and its imports use
the replacements. The installed Synapse is compared with them first; if it differs,
nothing is started.
"""

from __future__ import annotations

import importlib
import linecache
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from synapse_replication.dropin import substitution
from synapse_replication.dropin.observer import load_hooks, prepare_announcement
from synapse_replication.dropin.settings import own_settings
from synapse_replication.errors import HooksNotFoundError, StreamConfigurationError


def main() -> NoReturn:
    """Replace the parts, and run the module."""
    parts, module, *arguments = sys.argv[1:]
    try:
        _prepare(parts.split(","))
    except (
        substitution.SubstitutionError,
        HooksNotFoundError,
        StreamConfigurationError,
    ) as error:
        for line in [*str(error).splitlines(), "nothing was started"]:
            sys.stderr.write(f"synapse-replication exec: {line}\n")
        sys.exit(2)
    # attrs stores the text of each method that it generates, for debuggers. What is
    # freed now, 1.4 MiB, is used for the modules that Synapse loads.
    linecache.clearcache()
    sys.argv = [module, *arguments]
    # run_module() replaces __main__ in sys.modules, so store the present __main__ under
    # a second name. Otherwise, inspect.stack() would search all modules for the file of
    # the outermost frame.
    sys.modules.setdefault(
        "synapse_replication.dropin.__main__", sys.modules["__main__"]
    )
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def _prepare(parts: Sequence[str]) -> None:
    """Replace the names of some parts.

    :raises SubstitutionError: if the installed Synapse differs from the table.
    :raises HooksNotFoundError: if a function that subscribes to hooks cannot be
        imported.
    :raises StreamConfigurationError: if the environment contains an invalid setting.
    """
    chosen = substitution.choose(parts, ())
    # The host chooses its reactor first; replaced_names imports one.
    importlib.import_module("synapse")
    from synapse_replication.dropin.replaced_names import replace_parts

    replace_parts(chosen)
    load_hooks(own_settings().hooks)
    installed = substitution.installed_version()
    problem = substitution.version_problem(installed)
    prepare_announcement(parts, installed, problem)


if __name__ == "__main__":
    main()
