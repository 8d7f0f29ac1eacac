-- The queries of a report; see counts.py. The start of a window is in s since 1970.

-- name: window_of
-- Creates a macro for the start of the window with a length in s.
CREATE MACRO window_of(time, length) AS
  (epoch_us(time) // (length::BIGINT * 1000000) * length)::BIGINT

-- name: counts
-- Counts rows by their index within their token, as input of other queries. The rows
-- of a token are numbered from 0. The number of rows with index ``n`` is the number of
-- tokens with more than ``n`` rows, so batch sizes can be computed without grouping by
-- token.
CREATE TABLE counts AS
SELECT stream, instance_name, row_index, count(*) AS rows, count(written_ts) AS timed,
  min(stream_id) AS first_token, max(stream_id) AS last_token,
  min(written_ts) AS first_ts, max(written_ts) AS last_ts
FROM rows GROUP BY ALL

-- name: written
-- The first and the last time of writing.
SELECT min(first_ts) AS first, max(last_ts) AS last FROM counts

-- name: totals
-- The rows and tokens of each writer; ``timed`` is the number of its rows whose time
-- of writing is known.
SELECT stream, instance_name, sum(rows)::BIGINT AS rows,
  coalesce(sum(rows) FILTER (row_index = 0), 0)::BIGINT AS tokens,
  min(first_token) AS first_token, max(last_token) AS last_token,
  sum(timed)::BIGINT AS timed, min(first_ts) AS first_ts, max(last_ts) AS last_ts
FROM counts GROUP BY stream, instance_name ORDER BY stream, instance_name

-- name: batches
-- The number of tokens by the number of rows that share them: ``bucket`` is the lower
-- bound of the number of rows; the upper bound, which is excluded, is twice as large.
-- The percentiles and ``largest`` are those of the stream.
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

-- name: over_time
-- The rows of each writer by the window in which they were written.
SELECT stream, instance_name, window_of(written_ts, $window) AS start, count(*) AS rows
FROM rows WHERE written_ts IS NOT NULL GROUP BY ALL

-- name: hottest
-- The rooms and users to which the most rows of ``mentioned`` refer; ``$limit`` is the
-- maximum number of rooms, and of users.
SELECT kind, name, count(*) AS rows
FROM (SELECT 'room' AS kind, room_id AS name FROM mentioned UNION ALL
  SELECT 'user', user_id FROM mentioned)
WHERE name IS NOT NULL GROUP BY kind, name
QUALIFY row_number() OVER (PARTITION BY kind ORDER BY rows DESC, name) <= $limit
ORDER BY kind, rows DESC, name

-- name: span
-- The first and the last time of arrival.
SELECT min(received_ts) AS first, max(received_ts) AS last FROM wire

-- name: since_beginning
-- Sets ``received_ts`` to the time since the beginning of the line's recording, as a
-- time after 1970-01-01, for recordings without a date. A damaged line's ``t`` means
-- nothing.
CREATE OR REPLACE TABLE wire AS
SELECT * EXCLUDE (known) REPLACE (
  make_timestamptz(((known - min(known) OVER (PARTITION BY recording))
    * 1000000)::BIGINT) AS received_ts)
FROM (SELECT *, if(is_damaged, NULL, t) AS known FROM wire)

-- name: arrived
-- Creates a table of the rows that arrived, each with the token of its batch. The
-- token and the time are those of the line that ends the batch, because a reader
-- cannot deliver the batch before that line. If the recording ends within a batch, the
-- rows of that batch have no token and are omitted.
CREATE TABLE arrived AS
SELECT recording, stream, instance_name, ending.token AS stream_id,
  ending.received_ts AS received_ts,
  -- Rows of events are ["ev", [event_id, room_id, ...]], or [kind, [room_id, ...]].
  if(stream = 'events', if(row ->> '$[0]' = 'ev', row ->> '$[1][1]', row ->> '$[1][0]'),
    room_of(stream, row)) AS room_id,
  user_of(stream, row) AS user_id,
  if(stream = 'caches', try_cast(row ->> '$[2]' AS BIGINT), NULL) AS wire_ms
FROM (
  SELECT *, first_value(
    if(token IS NULL, NULL, {token: token, received_ts: received_ts}) IGNORE NULLS)
    OVER (PARTITION BY recording, stream, instance_name ORDER BY line_number
      ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS ending
  FROM wire WHERE command = 'RDATA')
WHERE ending IS NOT NULL

-- name: arrived_over_time
-- The rows of each writer by the window in which they arrived.
SELECT stream, instance_name, window_of(received_ts, $window) AS start, count(*) AS rows
FROM arrived WHERE received_ts IS NOT NULL GROUP BY ALL

-- name: late
-- Creates a table of the time between the writing and the arrival of each token, in
-- ms. The time of writing comes from the row in the table or, for ``caches``, from the
-- row on the wire. Tokens whose time of writing is unknown are omitted. A lag includes
-- the difference between the clocks of the writer and of the recorder.
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

-- name: lags
-- Percentiles of lags in ms, by stream, and by stream and window. ``least`` is only
-- negative if the clocks of writer and recorder differ; ``start`` is null for all
-- windows of a stream.
SELECT stream, window_of(received_ts, $window) AS start, count(*) AS tokens,
  quantile_disc(lag_ms, 0.5) AS p50, quantile_disc(lag_ms, 0.95) AS p95,
  quantile_disc(lag_ms, 0.99) AS p99, min(lag_ms) AS least
FROM late GROUP BY GROUPING SETS ((stream), (stream, start)) ORDER BY stream

-- name: events
-- The newest POSITION lines that reset a stream, or make a reader catch up, with the
-- total number of such lines. Each line is compared with ``known``: the greatest token
-- that a reader has received from the writer in the previous POSITION and since then;
-- it need not be the last one, because ``caches`` may have late rows. If ``token`` is
-- less than ``known``, the writer has reset the stream. Otherwise, if ``prev_token``
-- is greater than ``known``, the reader has to fetch the rows above ``known``. A
-- POSITION before which the recording has no token of the writer in the stream is
-- neither.
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
  stream, instance_name, received_ts, recording, line_number, known, prev_token, token,
  count(*) OVER () AS total
FROM (
  SELECT recording, stream, instance_name, unnest(line), lag(reached) OVER (
    PARTITION BY recording, stream, instance_name ORDER BY span) AS known
  FROM spans)
WHERE kind IS NOT NULL
ORDER BY received_ts DESC NULLS LAST, line_number DESC
LIMIT $limit

-- name: commands
-- The number of lines of each command; null for lines that cannot be parsed.
SELECT command, count(*) AS lines FROM wire GROUP BY command ORDER BY lines DESC
