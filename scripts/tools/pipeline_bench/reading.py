"""How fast rows are read: by the data source, by JDBC, by COPY in one process.

All three run the same queries over the same rows, and all columns are used: Spark's
readers leave out what nobody asks for.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator

import attrs
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from scripts.tools.pipeline_bench.memory import WorkerMemory
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.database import READ_TIMEOUT, reading
from synapse_replication.pipeline.source.jdbc import has_driver, read_by_jdbc
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.ranges import range_sql

__all__ = ["Reading", "measure_reading"]


@attrs.frozen
class Reading:
    """What one way of reading came to.

    :ivar seconds: of each round.
    :ivar worker_mib: most memory of any Python worker, MiB; ``None`` where there is
        none.
    """

    name: str
    rows: int
    seconds: tuple[float, ...]
    worker_mib: float | None = None

    @property
    def rate(self) -> float:
        """Rows in a second, of the best round."""
        return self.rows / min(self.seconds)


def measure_reading(
    session: SparkSession,
    settings: PipelineSettings,
    rounds: int,
    report: Callable[[str], object],
) -> list[Reading]:
    """Read all streams in each way, in turns.

    :param report: told what is being done.
    """
    ways: dict[str, Callable[[], int]] = {
        "data source": lambda: _use_all(_by_source(session, settings)),
        "COPY in one process": lambda: _copy_alone(settings),
    }
    if has_driver(session):
        ways["JDBC"] = lambda: _use_all(read_by_jdbc(session, settings))
    rows: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, float] = {}
    for turn in range(rounds):
        for name, read in ways.items():
            with WorkerMemory() as workers:
                begun = time.perf_counter()
                rows[name] = read()
                seconds[name].append(time.perf_counter() - begun)
            if name == "data source":
                most = max(workers.most.values(), default=0) / 1024
                memory[name] = max(memory.get(name, 0), most)
            report(f"round {turn + 1}: {name}: {seconds[name][-1]:.1f} s")
    return [
        Reading(name, rows[name], tuple(seconds[name]), memory.get(name))
        for name in ways
    ]


def _by_source(session: SparkSession, settings: PipelineSettings) -> DataFrame:
    source = session.read.format("synapse_replication")
    return source.options(**reader_options(settings)).load()


def _use_all(frame: DataFrame) -> int:
    """Count rows, and look at every column of each."""
    hashed = sf.xxhash64(*frame.columns)
    (row,) = (
        frame.select(hashed.alias("hash"))
        .agg(sf.count("*").alias("rows"), sf.bit_xor("hash"))
        .collect()
    )
    return int(row["rows"])


class _Counter(io.RawIOBase):
    """Splits CSV into tuples as it comes, and counts them."""

    def __init__(self) -> None:
        self.rows = 0
        self._kept: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._kept.append(data)
        self._size += len(data)
        if self._size > 2**20:
            self.flush()
        return len(data)

    def flush(self) -> None:
        text = io.StringIO(b"".join(self._kept).decode(), newline="")
        self._kept, self._size = [], 0
        for record in csv.reader(text):
            self.rows += len(record) > 0


def _copy_alone(settings: PipelineSettings) -> int:
    """Read all streams by COPY, one after the other, and split rows into tuples."""
    counter = _Counter()
    for sql, walk_indexes in _queries(settings):
        with reading(settings.conninfo, READ_TIMEOUT, walk_indexes=walk_indexes) as txn:
            txn.copy_expert(f"COPY ({sql}) TO STDOUT WITH (FORMAT csv)", counter)
    counter.flush()
    return counter.rows


def _queries(settings: PipelineSettings) -> Iterator[tuple[str, bool]]:
    options = SourceOptions.parse({**reader_options(settings), "numPartitions": "1"})
    for task in Planner(options, continuous=False).batch():
        for part in task:
            sql = range_sql(part.stream, part.span, part.present, part.sole_writer)
            yield sql, part.walks_indexes


#: Which Arrow did the work.
ARROW_VERSION: str = pa.__version__
