"""Tests against peers that are too large or too slow for every run, and long tests.

Each package below has one ``tox`` environment, and needs one peer; that of
:mod:`tests.external.long` needs only time. A test module
declares its package with ``skip = skip_reason("synapse")``: its tests are skipped with
that reason, unless the environment variable :data:`VARIABLE` names the package and the
modules of the peer can be imported. So ``trial tests`` imports everything here and runs
none of it, whatever is installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec

import attrs

#: Environment variable with the names of the packages to run, separated by commas.
VARIABLE = "SYNAPSE_REPLICATION_EXTERNAL"


@attrs.frozen
class Peer:
    """The peer of one package of tests.

    :ivar environment: the ``tox`` environment that runs them.
    :ivar modules: Python modules that must be importable.
    :ivar programs: programs that must be on ``PATH``.
    """

    environment: str
    modules: tuple[str, ...]
    programs: tuple[str, ...] = ()


PEERS: Mapping[str, Peer] = {
    "browser": Peer("browser", ("selenium",), ("chromium", "chromedriver")),
    "cluster": Peer("spark", ("pyspark",)),
    "long": Peer("long", ("pyspark",)),
    "synapse": Peer("synapse", ("synapse",)),
}


def skip_reason(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why the tests of a package cannot run here, or ``None`` if they can.

    :param name: a key of :data:`PEERS`.
    :param environ: the environment variables.
    """
    peer = PEERS[name]
    if name not in environ.get(VARIABLE, "").split(","):
        return f"runs only with {VARIABLE}={name}, as 'tox -e {peer.environment}' does"
    missing = [module for module in peer.modules if find_spec(module) is None]
    missing += [program for program in peer.programs if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; see 'tox -e {peer.environment}'"
    return None
