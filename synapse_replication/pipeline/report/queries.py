"""The queries of a report, for DuckDB.

They read these tables:

* ``rows``: columns of ROWS_SCHEMA, ``room_id`` and ``user_id``; the time of a row is
  the time at which it was written; null if its table does not record it;
* ``wire``: columns of WIRE_SCHEMA; ``is_damaged`` is whether a line is an invalid
  record;
* ``arrived``: rows of recordings, see :data:`ARRIVED`; ``counts``: see :data:`COUNTS`;
  ``late``: see :data:`LATE`.

The parameter ``$window`` is the length of a window in s; the start of a window is in s
since 1970.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from synapse_replication.streams.standard.registry import STANDARD_STREAMS

_WINDOW: Final = "(epoch_us({time}) // ($window::BIGINT * 1000000) * $window)::BIGINT"

#: Counts rows by their index within their token, as input of other queries. The rows of
#: a token are numbered from 0. The number of rows with index ``n`` is the number of
#: tokens with more than ``n`` rows, so batch sizes can be computed without grouping by
#: token.
COUNTS: Final = """
CREATE TABLE counts AS
SELECT stream, instance_name, row_index, count(*) AS rows, count(written_ts) AS timed,
  min(stream_id) AS first_token, max(stream_id) AS last_token,
  min(written_ts) AS first_ts, max(written_ts) AS last_ts
FROM rows GROUP BY ALL
"""

#: The first and the last time of writing.
WRITTEN: Final = "SELECT min(first_ts) AS first, max(last_ts) AS last FROM counts"

#: The rows and tokens of each writer; ``timed`` is the number of its rows whose time of
#: writing is known.
TOTALS: Final = """
SELECT stream, instance_name, sum(rows)::BIGINT AS rows,
  coalesce(sum(rows) FILTER (row_index = 0), 0)::BIGINT AS tokens,
  min(first_token) AS first_token, max(last_token) AS last_token,
  sum(timed)::BIGINT AS timed, min(first_ts) AS first_ts, max(last_ts) AS last_ts
FROM counts GROUP BY stream, instance_name ORDER BY stream, instance_name
"""

#: The number of tokens by the number of rows that share them: ``bucket`` is the lower
#: bound of the number of rows; the upper bound, which is excluded, is twice as large.
#: The percentiles and ``largest`` are those of the stream.
BATCHES: Final = """
WITH sizes AS (
  SELECT stream, row_index + 1 AS size, rows - coalesce(
    lead(rows) OVER (PARTITION BY stream ORDER BY row_index), 0) AS tokens
  FROM (SELECT stream, row_index, sum(rows)::BIGINT AS rows FROM counts GROUP BY ALL)
  QUALIFY tokens > 0),
ranked AS (
  SELECT *, sum(tokens) OVER (PARTITION BY stream ORDER BY size)
    / sum(tokens) OVER (PARTITION BY stream) AS share FROM sizes),
described AS (
  SELECT stream, min(size) FILTER (share >= 0.5) AS p50,
    min(size) FILTER (share >= 0.99) AS p99, max(size) AS largest
  FROM ranked GROUP BY stream)
SELECT stream, 1 << floor(log2(size))::INTEGER AS bucket, sum(tokens)::BIGINT AS tokens,
  p50, p99, largest
FROM sizes JOIN described USING (stream) GROUP BY ALL ORDER BY stream, bucket
"""


def over_time(table: str, time: str) -> str:
    """Return a query that counts the rows of a table by writer and window."""
    start = _WINDOW.format(time=time)
    return f"""
        SELECT stream, instance_name, {start} AS start, count(*) AS rows
        FROM {table} WHERE {time} IS NOT NULL GROUP BY ALL
    """


def hottest(table: str) -> str:
    """Return a query for the rooms and users to which the most rows of a table refer.

    The parameter ``$limit`` is the maximum number of rooms, and of users.
    """
    return f"""
        SELECT kind, name, count(*) AS rows
        FROM (SELECT 'room' AS kind, room_id AS name FROM {table} UNION ALL
          SELECT 'user', user_id FROM {table})
        WHERE name IS NOT NULL GROUP BY kind, name
        QUALIFY row_number() OVER (PARTITION BY kind ORDER BY rows DESC, name) <= $limit
        ORDER BY kind, rows DESC, name
    """


#: The first and the last time of arrival.
SPAN: Final = "SELECT min(received_ts) AS first, max(received_ts) AS last FROM wire"

#: Sets ``received_ts`` to the time since the beginning of the line's recording, as a
#: time after 1970-01-01, for recordings without a date. A damaged line's ``t`` means
#: nothing.
SINCE_BEGINNING: Final = """
CREATE OR REPLACE TABLE wire AS
SELECT * EXCLUDE (known) REPLACE (
  make_timestamptz(((known - min(known) OVER (PARTITION BY recording))
    * 1000000)::BIGINT) AS received_ts)
FROM (SELECT *, if(is_damaged, NULL, t) AS known FROM wire)
"""


def _value_at(field: str) -> str:
    """Return an expression for a field of a JSON row, if the stream's rows have it."""
    cases = []
    for stream in STANDARD_STREAMS.values():
        # Rows of events have several types.
        row_type: Any = getattr(stream.description.codec, "row_type", None)
        names = list(attrs.fields_dict(row_type)) if row_type else []
        if field in names:
            cases.append(f"WHEN '{stream.name}' THEN row ->> '$[{names.index(field)}]'")
    if field == "room_id":
        # Rows are ["ev", [event_id, room_id, ...]], or [kind, [room_id, ...]].
        cases.append(
            "WHEN 'events' THEN if(row ->> '$[0]' = 'ev', row ->> '$[1][1]', "
            "row ->> '$[1][0]')"
        )
    return f"CASE stream {' '.join(cases)} END AS {field}"


#: Creates a table of the rows that arrived, each with the token of its batch. The token
#: and the time are those of the line that ends the batch, because a reader cannot
#: deliver the batch before that line. If the recording ends within a batch, the rows of
#: that batch have no token and are omitted.
ARRIVED: Final = f"""
CREATE TABLE arrived AS
SELECT recording, stream, instance_name, ending.token AS stream_id,
  ending.received_ts AS received_ts, {_value_at("room_id")}, {_value_at("user_id")},
  if(stream = 'caches', try_cast(row ->> '$[2]' AS BIGINT), NULL) AS wire_ms
FROM (
  SELECT *, first_value(
    if(token IS NULL, NULL, {{token: token, received_ts: received_ts}}) IGNORE NULLS)
    OVER (PARTITION BY recording, stream, instance_name ORDER BY line_number
      ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS ending
  FROM wire WHERE command = 'RDATA')
WHERE ending IS NOT NULL
"""

#: Creates a table of the time between the writing and the arrival of each token, in ms.
#: The time of writing comes from the row in the table or, for ``caches``, from the row
#: on the wire. Tokens whose time of writing is unknown are omitted. A lag includes the
#: difference between the clocks of the writer and of the recorder.
LATE: Final = """
CREATE TABLE late AS
WITH tokens AS (
  SELECT recording, stream, instance_name, stream_id, min(received_ts) AS received_ts,
    max(wire_ms) AS wire_ms
  FROM arrived GROUP BY ALL),
written AS (
  SELECT stream, instance_name, stream_id, max(written_ts) AS written_ts
  FROM rows SEMI JOIN tokens USING (stream, instance_name, stream_id)
  WHERE stream <> 'caches' GROUP BY ALL)
SELECT stream, received_ts,
  (epoch_us(received_ts) - coalesce(wire_ms * 1000, epoch_us(written_ts))) / 1000
    AS lag_ms
FROM tokens LEFT JOIN written USING (stream, instance_name, stream_id)
WHERE lag_ms IS NOT NULL
"""

_LAGS: Final = """
SELECT stream, {start} AS start, count(*) AS tokens, quantile_disc(lag_ms, 0.5) AS p50,
  quantile_disc(lag_ms, 0.95) AS p95, quantile_disc(lag_ms, 0.99) AS p99,
  min(lag_ms) AS least
FROM late GROUP BY ALL ORDER BY stream
"""

#: Percentiles of lags in ms, by stream, and by stream and window. ``least`` is only
#: negative if the clocks of writer and recorder differ.
LAGS: Final = _LAGS.format(start="NULL")
LAGS_OVER_TIME: Final = _LAGS.format(start=_WINDOW.format(time="received_ts"))

#: The POSITION lines that reset a stream, or make a reader catch up, newest first. Each
#: line is compared with ``known``: the greatest token that a reader has received from
#: the writer in the previous POSITION and since then; it need not be the last one,
#: because ``caches`` may have late rows. If ``token`` is less than ``known``, the
#: writer has reset the stream. Otherwise, if ``prev_token`` is greater than ``known``,
#: the reader has to fetch the rows above ``known``. A POSITION before which the
#: recording has no token of the writer in the stream is neither.
EVENTS: Final = """
WITH lines AS (
  SELECT *, count(*) FILTER (command = 'POSITION') OVER (
    PARTITION BY recording, stream, instance_name ORDER BY line_number) AS span
  FROM wire WHERE command IN ('RDATA', 'POSITION') AND token IS NOT NULL),
spans AS (
  SELECT recording, stream, instance_name, span, max(token) AS reached,
    any_value({line_number: line_number, received_ts: received_ts,
      prev_token: prev_token, token: token}) FILTER (command = 'POSITION') AS line
  FROM lines GROUP BY ALL)
SELECT CASE WHEN token < known THEN 'reset' WHEN prev_token > known THEN 'catch-up' END
    AS kind,
  stream, instance_name, received_ts, recording, line_number, known, prev_token, token
FROM (
  SELECT recording, stream, instance_name, unnest(line), lag(reached) OVER (
    PARTITION BY recording, stream, instance_name ORDER BY span) AS known
  FROM spans)
WHERE kind IS NOT NULL
ORDER BY received_ts DESC NULLS LAST, line_number DESC
"""

#: The number of lines of each command; null for lines that cannot be parsed.
COMMANDS: Final = """
SELECT command, count(*) AS lines FROM wire GROUP BY command ORDER BY lines DESC
"""
