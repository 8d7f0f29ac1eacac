"""Makes the archive of Java's classes: runs a session that uses what jobs use.

:meth:`.class_archive.ClassArchive.start_maker` runs it in the background, with the
environment in which Java writes the archive at the end of a session. Nobody reads its
output: if it fails, there is no archive.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from synapse_replication.pipeline.spark.class_archive import ClassArchive
from synapse_replication.pipeline.spark.java import find_java
from synapse_replication.pipeline.spark.session import SparkJob

#: What the statements of jobs use: joins, aggregates, windows and arrays.
_STATEMENT: Final = """
WITH numbers AS (
    SELECT id, id % 3 AS rest, CAST(id AS STRING) AS text, sequence(0, id) AS many
    FROM range(0, 10, 1, 2)
),
ranked AS (
    SELECT *, row_number() OVER (PARTITION BY rest ORDER BY id) AS rank,
        max(id) OVER (PARTITION BY rest ORDER BY id) AS most
    FROM numbers
)
SELECT rest, count(*) AS rows, collect_list(text) AS texts, bit_or(most) AS bits
FROM ranked JOIN (SELECT rest, explode(many) AS one FROM numbers) USING (rest)
WHERE rank < 5 AND text IS NOT NULL
GROUP BY rest HAVING count(*) > 1 ORDER BY rest
"""


def make(new: str, extra: str, of_spark: str) -> bool:
    """Make the archive, and let jobs use it.

    :param new: the file that Java writes.
    :param extra: the class path that the user configured.
    :param of_spark: the class path of Spark.
    :return: whether jobs can use it.
    :raises SparkMissingError: if Java or PySpark is missing, or Java does not start.
    """
    with SparkJob("synapse-replication class archive", master="local[2]") as spark:
        spark.start(0)
        spark().sql(_STATEMENT).toArrow()
        numbers = spark().range(0, 2, numPartitions=2)
        numbers.mapInArrow(lambda batches: batches, "id long").toArrow()
    return ClassArchive.of(find_java(), extra, of_spark).adopt(Path(new))


if __name__ == "__main__":
    os.nice(19)
    sys.exit(0 if make(*sys.argv[1:]) else 1)
