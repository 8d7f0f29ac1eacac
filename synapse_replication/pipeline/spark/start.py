"""Starts Spark's Java process well: at once, in the background, with a class archive.

PySpark starts Java with the script ``spark-submit``, which first starts another Java
process to compute the command line, and only when a session is requested. This module
computes the same command line, starts Java before PySpark is imported, and hands the
process to PySpark when it is ready. Java then runs Spark's own ``SparkSubmit``, which
reads ``spark-defaults.conf`` and the arguments as always.

What changes the command line is taken from where ``spark-submit`` takes it: the
settings of the caller, and those of the user, see
:mod:`~synapse_replication.pipeline.spark.user_settings`. If the consequences of any are
not known, this module leaves the start to ``spark-submit``.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from synapse_replication.errors import SparkMissingError, excerpt
from synapse_replication.pipeline.spark.class_archive import ClassArchive, cache_folder
from synapse_replication.pipeline.spark.java import (
    JavaErrors,
    filtered_stderr,
    find_java,
    set_java_of_submit,
)
from synapse_replication.pipeline.spark.user_settings import UserSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Spark's default of ``spark.driver.memory``.
_MEMORY: Final = "1g"

#: What Spark requires of each Java. An option that a Java does not know is ignored.
_REQUIRED: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(
        f"--add-opens=java.base/{package}=ALL-UNNAMED"
        for package in (
            *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io"),
            *("java.net", "java.nio", "java.util", "java.util.concurrent"),
            *("java.util.concurrent.atomic", "jdk.internal.ref", "sun.nio.ch"),
            *("sun.nio.cs", "sun.security.action", "sun.util.calendar"),
        )
    ),
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)

#: For a job of a few seconds: compile quickly instead of well, with one thread for
#: garbage.
_SHORT_OPTIONS: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")

#: The interval at which to look whether Java is ready, in s.
_POLL_SECONDS: Final = 0.005

#: How long to wait for a master's answer, in s.
_PATIENCE: Final = 10.0

_LOCAL: Final = re.compile(r"local(\[.*\])?")


def check_master(master: str) -> None:
    """Check that a process listens at the address of a standalone master.

    Spark itself would try for a minute, and would not name the address.

    :raises SparkMissingError: if nothing listens at any of the addresses.
    """
    if not master.startswith("spark://"):
        return
    reasons = []
    for each in master.removeprefix("spark://").split(","):
        host, _, port = each.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _PATIENCE):
                return
        except (OSError, ValueError) as error:
            reasons.append(f"{each}: {error}")
    raise SparkMissingError(
        f"the Spark master {excerpt(master)} cannot be reached "
        f"({excerpt('; '.join(reasons))}); is it running, and can this machine reach "
        "it? Check --master, which is written as spark://HOST:PORT"
    )


def spark_home() -> Path:
    """Return Spark's folder: ``SPARK_HOME``, or the one inside PySpark.

    :raises SparkMissingError: if PySpark is missing, or ``SPARK_HOME`` is not the
        folder of the same version of Spark.
    """
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        raise SparkMissingError(
            "pyspark is missing; install it with: "
            "pip install 'synapse_replication[spark]'"
        )
    own = Path(found.origin).parent
    given = os.environ.get("SPARK_HOME")
    if not given or Path(given) == own:
        return own
    home, version = Path(given), _version_of(own)
    if not (home / "bin" / "spark-submit").is_file() or _version_of(home) is None:
        raise SparkMissingError(
            f"SPARK_HOME is {excerpt(given)}, which is not a folder of Spark: unset it "
            "(PySpark contains Spark), or set it to the folder of Spark"
        )
    if version is not None and _version_of(home) != version:
        raise SparkMissingError(
            f"SPARK_HOME is {excerpt(given)} with Spark {_version_of(home)}, but the "
            f"installed PySpark is {version}: unset SPARK_HOME, or install the PySpark "
            "of that version"
        )
    return home


def _version_of(home: Path) -> str | None:
    for jar in (home / "jars").glob("spark-core_*.jar"):
        return jar.stem.rpartition("-")[2]
    return None


class JavaStart:
    """The start of Spark's Java process.

    The constructor starts the process and returns at once; :meth:`connect` waits.

    :param settings: Spark's settings, with which PySpark will create the session.
    :param user: what the user configured.
    :param is_short: whether the job ends within a few seconds.
    :raises SparkMissingError: if Java is missing or too old, or cannot work for this
        user, or with the folder of temporary files.
    """

    def __init__(
        self,
        home: Path,
        settings: Mapping[str, str],
        user: UserSettings,
        *,
        is_short: bool = False,
    ) -> None:
        _check_user()
        self._java = find_java()
        self._settings = dict(settings)
        self._errors = JavaErrors()
        self._user = user
        self._missing: ClassArchive | None = None
        self._folder: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None
        if user.is_known:
            self._start(home, is_short=is_short)

    def _start(self, home: Path, *, is_short: bool) -> None:
        first = self._configured("spark.driver.extraClassPath")
        archive = ClassArchive.of(self._java, first, _class_path(home))
        options: list[str] = []
        if (found := archive.find()) is not None:
            options = archive.options_to_use(found)
        else:
            self._missing = archive
        if is_short:
            options += _SHORT_OPTIONS
        self._folder = _temporary_folder()
        options.append(f"-Djava.io.tmpdir={self._folder}")
        self._answer = self._folder / "gateway"
        is_local = _LOCAL.fullmatch(
            self._user.master(self._settings.get("spark.master"))
        )
        with filtered_stderr(self._errors) as stderr:
            self.process = subprocess.Popen(
                self._command(archive.class_path, options),
                env=_environment(home, self._answer, is_local=bool(is_local)),
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                # An interrupt from the keyboard is for the job, which ends Java.
                start_new_session=True,
            )

    def _configured(self, name: str) -> str:
        """Return the value of a setting; empty without one."""
        # Later settings of spark-submit's command line replace earlier ones.
        found = self._user.given.get(name) or self._settings.get(name)
        return found or self._user.settings.get(name, "")

    def _command(self, class_path: str, options: Sequence[str]) -> list[str]:
        value = self._configured
        memory = value("spark.driver.memory") or os.environ.get("SPARK_DRIVER_MEMORY")
        configured = [f"--conf={k}={v}" for k, v in self._settings.items()]
        return [
            *(self._java.path, "-cp", class_path),
            *shlex.split(os.environ.get("SPARK_SUBMIT_OPTS", "")),
            *(f"-Xmx{memory or _MEMORY}", "-XX:-UsePerfData", *options),
            *shlex.split(value("spark.driver.defaultJavaOptions")),
            *shlex.split(value("spark.driver.extraJavaOptions")),
            *_REQUIRED,
            *("org.apache.spark.deploy.SparkSubmit", *configured),
            *self._user.arguments,
        ]

    def connect(self) -> None:
        """Wait for Java, and make its gateway the one of PySpark.

        :raises SparkMissingError: if Java does not start. The message says why.
        """
        from pyspark import SparkConf, SparkContext, java_gateway
        from pyspark.errors import PySparkRuntimeError

        # PySpark is only partly typed.
        launch: Any = java_gateway.launch_gateway
        gateway: Any
        if self.process is None:
            conf = SparkConf(loadDefaults=False).setAll(list(self._settings.items()))
            set_java_of_submit(self._java)
            try:
                with filtered_stderr(self._errors) as stderr:
                    gateway = launch(conf, {"stderr": stderr})
            except PySparkRuntimeError as error:
                raise self._failed() from error
        else:
            port, secret = self._wait(self.process)
            variables = {
                "PYSPARK_GATEWAY_PORT": str(port),
                "PYSPARK_GATEWAY_SECRET": secret,
            }
            os.environ.update(variables)
            try:
                gateway = launch()
            finally:
                for name in variables:
                    del os.environ[name]
            gateway.proc = self.process
        self._errors.release()
        SparkContext._ensure_initialized(gateway=gateway)

    def _wait(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        while True:
            ended = process.poll() is not None
            with contextlib.suppress(FileNotFoundError):
                answer = self._answer.read_bytes()
                if len(answer) >= 8:
                    port, length = struct.unpack("!ii", answer[:8])
                    if len(answer) == 8 + length:
                        return port, answer[8:].decode()
            if ended:
                raise self._failed()
            time.sleep(_POLL_SECONDS)

    def _failed(self) -> SparkMissingError:
        return SparkMissingError(
            f"Java did not start: {self._errors.cause}; check --master, "
            "PYSPARK_SUBMIT_ARGS and the memory that Spark's settings demand"
        )

    # -- its end -----------------------------------------------------------------------

    def end(self) -> None:
        """End Java, and what PySpark knows of it.

        If nothing can be lost, Java is killed. Otherwise, it ends in order. If there is
        no class archive, the process that makes it is started.
        """
        process, session = self.process, _running_session(self.process)
        is_running = process is None or process.poll() is None
        keeps_events = process is None or not self._can_be_killed
        if session is not None and is_running and keeps_events:
            session.stop()
        if process is not None:
            _forget_gateway(process)
            if session is None or not keeps_events:
                process.kill()
            assert process.stdin is not None
            # Java exits at the end of its standard input.
            process.stdin.close()
            process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if session is not None and self._missing is not None:
            self._missing.start_maker()

    @property
    def _can_be_killed(self) -> bool:
        """Whether nothing is lost if Java is killed once the results are there.

        On a cluster, other processes have to be told of the end.
        """
        master = self._user.master(self._settings.get("spark.master"))
        return bool(_LOCAL.fullmatch(master)) and self._user.has_nothing_to_stop


def _running_session(process: subprocess.Popen[bytes] | None) -> SparkSession | None:
    """Return the session of a Java, without importing PySpark.

    :param process: the Java; ``None`` for one that PySpark has started.
    """
    pyspark, sql = sys.modules.get("pyspark"), sys.modules.get("pyspark.sql")
    if pyspark is None or sql is None:
        return None
    gateway = pyspark.SparkContext._gateway
    if process is not None and (gateway is None or gateway.proc is not process):
        return None
    session: SparkSession | None = sql.SparkSession._instantiatedSession
    return session


def _forget_gateway(process: subprocess.Popen[bytes]) -> None:
    """Let PySpark start Java again if a session is made later.

    :param process: the Java that ends.
    """
    pyspark = sys.modules.get("pyspark")
    if pyspark is None:
        return
    context: Any = pyspark.SparkContext
    gateway = context._gateway
    if gateway is None or gateway.proc is not process:
        return
    active, session = context._active_spark_context, sys.modules["pyspark.sql"]
    if active is not None:
        # Its stop() would call Java.
        active._jsc = None
        server, active._accumulatorServer = active._accumulatorServer, None
        if server is not None:
            # It would print a traceback because Java has closed the connection.
            server.handle_error = lambda *arguments: None
            # This takes a second, and nobody waits for it.
            threading.Thread(target=server.shutdown, daemon=True).start()
        active.stop()
    session.SparkSession._instantiatedSession = None
    session.SparkSession._activeSession = None
    context._gateway = context._jvm = None
    gateway.close()


def _class_path(home: Path) -> str:
    conf = os.environ.get("SPARK_CONF_DIR") or f"{home}/conf"
    # In a fixed order, to which a class archive is bound. Java looks for each class in
    # one jar after the other, and nearly all are in those of Spark and Scala.
    jars = sorted(
        map(str, (home / "jars").glob("*.jar")),
        key=lambda jar: (not Path(jar).name.startswith(("spark-", "scala-")), jar),
    )
    return os.pathsep.join([f"{conf}/", *jars])


def _temporary_folder() -> Path:
    """Create the folder of Java's temporary files.

    Java loads native libraries from it. If programs in the folder of temporary files
    cannot be executed, it is made in the user's cache folder.

    :raises SparkMissingError: if neither is possible.
    """
    prefix, usual = "synapse-replication-java-", tempfile.gettempdir()
    if not os.statvfs(usual).f_flag & os.ST_NOEXEC:
        return Path(tempfile.mkdtemp(prefix=prefix))
    other = cache_folder()
    if other is None or os.statvfs(other).f_flag & os.ST_NOEXEC:
        raise SparkMissingError(
            f"Java must load libraries from {usual}, which is mounted with noexec; set "
            "TMPDIR to a folder of another file system"
        )
    return Path(tempfile.mkdtemp(prefix=prefix, dir=other))


def _check_user() -> None:
    """Check that Java can determine the name of the user.

    :raises SparkMissingError: if the user is unknown, as in a container that runs with
        any user id.
    """
    user = os.geteuid()
    try:
        pwd.getpwuid(user)
    except KeyError:
        raise SparkMissingError(
            f"Java cannot determine the user, because /etc/passwd has no entry for "
            f"user id {user}: add one (echo 'spark:x:{user}:{os.getegid()}::/tmp:/bin/"
            "sh' >> /etc/passwd), or run the job as another user"
        ) from None


def _environment(home: Path, answer: Path, *, is_local: bool) -> dict[str, str]:
    """Return the environment variables that ``spark-submit`` would set for Java."""
    environ = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_ENV_LOADED": "1",
        "SPARK_SCALA_VERSION": "2.13",
        "SPARK_CONNECT_MODE": "0",
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(answer),
    }
    if is_local:
        # Nobody else connects to it, and the machine's name need not resolve.
        environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return environ
