"""The settings of Spark that jobs and sessions of this package need, each with why."""

from __future__ import annotations

import tempfile
from pathlib import Path

import attrs

#: The settings of Log4j.
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")


@attrs.frozen
class Setting:
    """A setting of Spark.

    :ivar reason: reStructuredText, for the manual.
    """

    name: str
    value: str
    reason: str


def own_settings() -> tuple[Setting, ...]:
    """Return the settings, in the manual's order, which users can override."""
    return (
        Setting("spark.sql.session.timeZone", "UTC", "All times are UTC."),
        Setting(
            "spark.driver.extraJavaOptions",
            f"-Duser.timezone=UTC -Xss8m -Dlog4j2.configurationFile={LOG_SETTINGS}",
            "Stopping a query within ``foreachBatch`` overflows the default stack. The "
            "last option hides irrelevant output.",
        ),
        Setting(
            "spark.executor.extraJavaOptions",
            "-Duser.timezone=UTC -Xss8m",
            "As above.",
        ),
        Setting(
            "spark.sql.python.filterPushdown.enabled",
            "true",
            "Needed by the option ``filterPushdown``.",
        ),
        Setting(
            "spark.sql.execution.arrow.pyspark.enabled",
            "true",
            "Conversions to pandas are faster.",
        ),
        Setting(
            "spark.python.authenticate.socketTimeout",
            "120s",
            "On a busy machine, a worker takes longer to start than the default of "
            "15 s.",
        ),
        Setting(
            "spark.sql.sources.parallelPartitionDiscovery.threshold",
            "10000",
            "No Spark job is started to list files: the transaction log of a Delta "
            "table names them already.",
        ),
        Setting("spark.ui.enabled", "false", "Jobs are short."),
        Setting(
            "spark.ui.showConsoleProgress",
            "false",
            "Jobs have a display of their own.",
        ),
        Setting(
            "spark.sql.warehouse.dir",
            f"{tempfile.gettempdir()}/synapse-replication-warehouse",
            "Otherwise, Spark would create it in the working directory.",
        ),
        Setting(
            "spark.redaction.regex",
            "(?i)secret|password|token|dsn|access[.]?key|url",
            "A ``dsn`` may contain a password: it is redacted in plans, logs and the "
            "web UI.",
        ),
        Setting(
            "spark.sql.adaptive.advisoryPartitionSizeInBytes",
            "16m",
            "A task sorts its rows in memory: with the default of 64 MiB, tasks of "
            "large jobs would exceed the memory of an executor.",
        ),
    )
