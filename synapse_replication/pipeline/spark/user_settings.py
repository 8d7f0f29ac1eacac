"""What the user configured for Spark, where ``spark-submit`` reads it.

These are ``PYSPARK_SUBMIT_ARGS``, ``spark-defaults.conf`` and the environment. If they
contain anything of which only ``spark-submit`` knows the consequences, the settings say
so.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

#: The options of ``spark-submit`` that change Java's command line, or Spark's settings
#: that matter here, and the setting that each of them is short for.
_SHORT: Final[Mapping[str, str]] = {
    "--master": "spark.master",
    "--driver-memory": "spark.driver.memory",
    "--driver-java-options": "spark.driver.extraJavaOptions",
    "--driver-class-path": "spark.driver.extraClassPath",
    "--executor-memory": "spark.executor.memory",
    "--executor-cores": "spark.executor.cores",
    "--total-executor-cores": "spark.cores.max",
    "--num-executors": "spark.executor.instances",
    "--packages": "spark.jars.packages",
    "--exclude-packages": "spark.jars.excludes",
    "--repositories": "spark.jars.repositories",
    "--jars": "spark.jars",
    "--name": "spark.app.name",
    "--py-files": "spark.submit.pyFiles",
    "--files": "spark.files",
    "--archives": "spark.archives",
    "--queue": "spark.yarn.queue",
}

#: Settings and variables of which ``spark-submit`` has to compute the consequences.
_NOT_KNOWN: Final = (
    "spark.driver.extraLibraryPath",
    "spark.driver.defaultExtraClassPath",
    "spark.submit.deployMode",
    "spark.remote",
    "spark.api.mode",
)
_VARIABLES_NOT_KNOWN: Final = (
    "SPARK_DIST_CLASSPATH",
    "HADOOP_CONF_DIR",
    "YARN_CONF_DIR",
    "SPARK_PREPEND_CLASSES",
    "SPARK_TESTING",
    "SPARK_SQL_TESTING",
    "SPARK_REMOTE",
    "SPARK_CONNECT_MODE",
)

#: Settings that a user may have without having anything to lose if Java is killed.
_NOTHING_TO_STOP: Final = frozenset(
    {
        "spark.master",
        "spark.driver.memory",
        "spark.executor.memory",
        "spark.sql.shuffle.partitions",
    }
)

#: Variables that may add agents to Java, which write at the end, or name a folder for
#: Spark's files, which are removed at the end.
_STOP_VARIABLES: Final = (
    *("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS"),
    "SPARK_LOCAL_DIRS",
)


@attrs.frozen
class UserSettings:
    """What the user configured for Spark, outside of this package.

    :ivar settings: Spark's settings, of ``PYSPARK_SUBMIT_ARGS`` before those of
        ``spark-defaults.conf``.
    :ivar given: the settings of ``PYSPARK_SUBMIT_ARGS`` alone.
    :ivar arguments: the arguments in ``PYSPARK_SUBMIT_ARGS``.
    :ivar is_known: whether this module knows the consequences of everything.
    """

    settings: Mapping[str, str]
    given: Mapping[str, str]
    arguments: Sequence[str]
    is_known: bool

    @classmethod
    def read(cls, home: Path) -> UserSettings:
        """Read the environment and ``spark-defaults.conf``.

        :param home: Spark's folder.
        """
        text = os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
        try:
            arguments = shlex.split(text)
        except ValueError:
            return cls({}, {}, (), is_known=False)
        given, is_known = _parse_arguments(arguments)
        folder = Path(os.environ.get("SPARK_CONF_DIR") or home / "conf")
        files = ("spark-env.sh", "java-opts")
        is_known &= not any((folder / name).exists() for name in files)
        defaults, is_readable = _parse_defaults(folder / "spark-defaults.conf")
        settings = {**defaults, **given}
        if (folder / "metrics.properties").exists():
            # Spark's default of the setting.
            settings.setdefault("spark.metrics.conf", "metrics.properties")
        is_known &= is_readable and not settings.keys() & set(_NOT_KNOWN)
        is_known &= not any(os.environ.get(name) for name in _VARIABLES_NOT_KNOWN)
        return cls(settings, given, arguments, is_known)

    def master(self, master: str | None) -> str:
        """Return the URL of the master that Spark will use.

        :param master: the one that the caller requests, if any.
        """
        found = master or self.settings.get("spark.master")
        return found or os.environ.get("MASTER") or "local[*]"

    @property
    def has_nothing_to_stop(self) -> bool:
        """Whether nothing that the user configured is lost if Java is killed.

        An event log, listeners, plug-ins, metrics, and agents write at the end.
        """
        return (
            self.is_known
            and self.settings.keys() <= _NOTHING_TO_STOP
            and not any(os.environ.get(name) for name in _STOP_VARIABLES)
        )


def _parse_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], bool]:
    """Return the settings in arguments of ``spark-submit``; false if one is unknown."""
    settings: dict[str, str] = {}
    todo = list(arguments)
    if not todo or todo.pop() != "pyspark-shell":
        return settings, False
    while todo:
        option, equals, value = todo.pop(0).partition("=")
        if not equals:
            if not todo:
                return settings, False
            value = todo.pop(0)
        if option in ("--conf", "-c"):
            name, equals, value = value.partition("=")
            if not equals:
                return settings, False
            settings[name] = value
        elif option in _SHORT:
            settings[_SHORT[option]] = value
        else:
            return settings, False
    return settings, True


def _parse_defaults(path: Path) -> tuple[dict[str, str], bool]:
    """Return the settings in a file of Java properties, and whether all are known."""
    settings: dict[str, str] = {}
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return settings, True
    except (OSError, ValueError):
        return settings, False
    if "\\" in text:
        # Escapes and continued lines: let Java read them.
        return settings, False
    for line in map(str.strip, text.splitlines()):
        if line and line[0] not in "#!":
            name, _, value = re.sub(r"\s*[=:\s]\s*", "=", line, count=1).partition("=")
            settings[name] = value
    return settings, True
