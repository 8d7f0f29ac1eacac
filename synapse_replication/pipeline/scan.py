"""Reads of rows, divided into the tasks of Spark's executors."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: The number of tasks that several files have at least.
_FEW_TASKS: Final = 2

#: The size of files in bytes for which a separate task pays off.
_TASK_BYTES: Final = 2 * 2**20

#: The number of tasks beyond which this size is a larger one, so that there are not
#: more than a driver can schedule.
_MANY_TASKS: Final = 64
_LARGE_TASK_BYTES: Final = 64 * 2**20

#: Spark's message if a worker takes more than 10 s to start. That limit cannot be
#: configured.
_SLOW_START: Final = "Python worker failed to connect back"

#: The maximum number of attempts to run tasks when workers are slow to start.
_STARTS: Final = 12

#: The columns of the frame of :func:`run_tasks`.
_RESULTS: Final = pa.schema([("number", pa.int64()), ("result", pa.binary())])

Batches = Iterator[pa.RecordBatch]

#: Returns the session of a job. The first call starts Spark.
Spark = Callable[[], "SparkSession"]


@attrs.frozen
class Scan:
    """Rows to read.

    :ivar schema: the columns of the batches.
    :ivar tasks: the argument of ``read`` for each task.
    :ivar read: returns the batches of a task. It is sent to executors.
    :ivar ids: the approximate number of rows.
    """

    schema: pa.Schema
    tasks: Sequence[Any]
    read: Callable[[Any], Batches]
    ids: int

    def then(self, work: Callable[[Batches], Batches], schema: pa.Schema) -> Scan:
        """Return the scan whose tasks also apply a function to their batches.

        :param work: called in each task; it yields batches with ``schema``.
        """
        read = self.read
        return Scan(schema, self.tasks, lambda task: work(read(task)), self.ids)

    def frame(self, session: SparkSession) -> DataFrame:
        """Return a frame; each query of the frame runs the tasks on executors."""
        from pyspark.sql.pandas.types import from_arrow_schema

        if not self.tasks:
            return table_frame(session, self.schema.empty_table())
        tasks, read = self.tasks, self.read

        def read_tasks(numbers: Batches) -> Batches:
            for batch in numbers:
                for number in batch.column("id").to_pylist():
                    yield from read(tasks[number])

        # Create a partition for each number, so that no shuffle is needed.
        numbers = session.range(0, len(tasks), numPartitions=len(tasks))
        return numbers.mapInArrow(read_tasks, from_arrow_schema(self.schema))


def run_tasks(
    work: Callable[[Any], _T], tasks: Sequence[Any], session: SparkSession
) -> list[_T]:
    """Call a function with each task on executors; return the results, in order.

    Each task is a partition of a frame. The frame's rows are the results, which should
    therefore be small: descriptions of files, not rows.

    :param work: sent to executors, like the tasks.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    if not tasks:
        return []

    def run(numbers: Batches) -> Batches:
        for batch in numbers:
            for number in batch.column("id").to_pylist():
                result = pickle.dumps(work(tasks[number]))
                yield to_batch([(number, result)], _RESULTS)

    numbers = session.range(0, len(tasks), numPartitions=len(tasks))
    frame = numbers.mapInArrow(run, from_arrow_schema(_RESULTS))
    found = _with_retries(frame.toArrow).sort_by("number")
    return [pickle.loads(result) for result in found.column("result").to_pylist()]


def _with_retries(collect: Callable[[], _T]) -> _T:
    """Run tasks again if Spark's workers are slow to start."""
    for attempt in range(1, _STARTS):
        try:
            return collect()
        except Exception as error:
            if _SLOW_START not in str(error):
                raise
            _logger.warning(
                "workers are slow to start; attempt %d of %d", attempt + 1, _STARTS
            )
    return collect()


def batched(
    items: Iterable[_T], size: Callable[[_T], int], limit: int
) -> Iterator[list[_T]]:
    """Group items in their order.

    :param size: returns the size of an item.
    :param limit: the maximum total size of a group, unless a single item is larger.
    """
    group: list[_T] = []
    total = 0
    for item in items:
        if group and total + size(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


def to_batch(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Convert rows to a batch."""
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [
        pa.array(values, field.type)
        for values, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def materialise(frame: DataFrame) -> DataFrame:
    """Compute a frame now, and return a frame of the result.

    Executors keep the result in memory and on disk until it is not used any more. On a
    cluster, two executors keep each part, so that the loss of one does not end the job.
    """
    from pyspark import StorageLevel

    master = frame.sparkSession.sparkContext.master or ""
    is_local = master.startswith("local") and not master.startswith("local-cluster")
    level = StorageLevel.MEMORY_AND_DISK if is_local else StorageLevel.MEMORY_AND_DISK_2
    if frame.sparkSession.conf.get("spark.sql.shuffle.partitions") == "1":
        # Queries of a single partition need no shuffle.
        frame = frame.coalesce(1)
    return frame.localCheckpoint(storageLevel=level)


def add_materialised_view(session: SparkSession, name: str, sql: str) -> DataFrame:
    """Compute the result of a query now, add it as a temporary view, and return it."""
    result = materialise(session.sql(sql))
    result.createOrReplaceTempView(name)
    return result


def table_frame(session: SparkSession, table: pa.Table) -> DataFrame:
    """Return a frame of a few rows, which are part of the query plan.

    Spark knows its rows when it plans a query, and removes operations on an empty
    frame. A frame created from a list would be evaluated in a Python worker, once for
    each query.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    return session.createDataFrame(table, from_arrow_schema(table.schema))


def grouped(items: Sequence[_T], size: Callable[[_T], int]) -> list[Sequence[_T]]:
    """Divide files among tasks, adjacent files among different ones.

    Adjacent files have similar sizes.

    :param size: returns the size of a file in bytes. Small files share a task.
    """
    total = sum(map(size, items))
    count = max(min(_MANY_TASKS, total // _TASK_BYTES), total // _LARGE_TASK_BYTES)
    count = min(len(items), max(_FEW_TASKS, count))
    return [items[number::count] for number in range(count)]
