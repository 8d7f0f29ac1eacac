"""Divides the rows to read into parts for tasks, without reading them.

All rows of one token are in the same part. The bounds are found by single lookups in
the indexes of ids; a part of a stream with a table that has no such index is not
narrowed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence

from psycopg2.extensions import cursor

from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.ranges import Part, Selection, ids_sql

#: The number of ids for which a separate task pays off.
IDS_PER_TASK = 250_000

#: The maximum number of tasks, unless the option ``numPartitions`` is set. It is
#: approximate, because dividing several parts may add one task for each of them.
MAX_TASKS = 400


def narrow(txn: cursor, part: Part) -> Part | None:
    """Trim the ids without rows at both ends of a part.

    :return: ``None`` if the part has no rows.
    """
    lows: list[int] = []
    highs: list[int] = []
    for query in part.queries:
        if not query.by_id:
            # Without an index that begins with the id, a table's least and greatest id
            # cannot be looked up.
            return part
        for ends, last in ((lows, False), (highs, True)):
            txn.execute(ids_sql(part, query, 1, last=last))
            ends += [id_ for (id_,) in txn.fetchall()]
    if not lows:
        return None
    return part.within(min(lows) - 1, max(highs))


def split(parts: Iterable[Part], count: int | None) -> list[Part]:
    """Divide parts into smaller ones with about the same number of ids.

    A part is not divided if a table has no index on the id, or on the writer and the
    id, because each piece would read the whole table.

    :param count: the desired number of parts; ``None`` to derive it from the number of
        ids. The result has at least one part for each part in ``parts``.
    """
    parts = list(parts)
    total = sum(part.size for part in parts)
    if count is None:
        count = min(-(-total // IDS_PER_TASK), MAX_TASKS)
    target = max(-(-total // max(count, 1)), 1)
    pieces: list[Part] = []
    for part in parts:
        pieces += _cut(part, target) if part.is_indexed else [part]
    return pieces


def _cut(part: Part, target: int) -> list[Part]:
    count = -(-part.size // target)
    low = part.low
    cuts = [low + part.size * index // count for index in range(count + 1)]
    return [part.within(low, high) for low, high in itertools.pairwise(cuts)]


def pack(parts: Iterable[Part], count: int | None) -> list[tuple[Part, ...]]:
    """Group small parts, so that each task has enough work.

    :param count: the desired number of tasks; ``None`` to derive it from the number of
        ids.
    """
    # Spark starts tasks in this order. If a long task were the last one, the other
    # cores would wait for it.
    largest_first = sorted(parts, key=lambda part: -part.work)
    total = sum(part.size for part in largest_first)
    if count is None:
        count = -(-total // IDS_PER_TASK)
    count = min(max(count, 1), len(largest_first))
    tasks: list[list[Part]] = [[] for _ in range(count)]
    # Assign each part to the task with the least work.
    load = [(0, index) for index in range(count)]
    for part in largest_first:
        work, index = heapq.heappop(load)
        tasks[index].append(part)
        heapq.heappush(load, (work + part.work, index))
    return [tuple(task) for task in tasks if task]


def cut_by_rows(
    txn: cursor,
    selections: Sequence[Selection],
    start: Mapping[str, StreamOffset],
    end: Mapping[str, StreamOffset],
    limit: int,
) -> dict[str, StreamOffset]:
    """Return offsets up to ``end``, with at most ``limit`` rows after ``start``.

    The limit is exceeded only if a single token has more rows, because there must be
    progress. All streams share the limit equally; the unused part of a stream's share
    is divided among the streams with more rows.

    :param start: the offset of each stream after which to count.
    :return: an offset for each stream.
    """
    tokens = {}
    counts = {}
    for selection in selections:
        name = selection.stream.name
        part = selection.between(start[name], end[name])
        first = (ids_sql(part, query, limit + 1) for query in part.queries)
        # The database counts the tokens, because there may be too many to fetch.
        tokens[name] = f"({' UNION ALL '.join(first)}) AS found"
        # If there are more rows than the limit, this is the limit plus one.
        counts[name] = _number(
            txn,
            f"SELECT count(*) FROM (SELECT FROM {tokens[name]} LIMIT {limit + 1}) "
            "AS first_of_them",
        )
    cut: dict[str, StreamOffset] = {}
    left = limit
    # Process the smallest streams first, because the larger ones get the unused parts
    # of their shares.
    waiting = sorted(counts, key=lambda name: counts[name])
    for index, name in enumerate(waiting):
        share = left // (len(waiting) - index)
        if counts[name] <= share:
            cut[name] = end[name]
            left -= counts[name]
            continue
        # The first token that exceeds the share is left for Spark's next micro-batch.
        found = f"FROM {tokens[name]}"
        beyond = _number(
            txn,
            f"SELECT stream_id {found} ORDER BY stream_id OFFSET {share} LIMIT 1",
        )
        used = _number(txn, f"SELECT count(*) {found} WHERE stream_id < {beyond}")
        if not used and share == left == limit:
            beyond += 1
            used = limit
        cut[name] = start[name].towards(end[name], beyond - 1)
        left -= used
    return cut


def _number(txn: cursor, sql: str) -> int:
    txn.execute(sql)
    ((value,),) = txn.fetchall()
    return int(value)
