-- The queries of a report, in Spark's SQL; see counts.py. The start of a window is in s
-- since 1970.

-- name: sums
-- Adds up the tallies of all tasks; see tallies.py.
SELECT counted, stream, instance_name, row_index, start, name, sum(rows) AS rows,
  sum(timed) AS timed, min(first_token) AS first_token, max(last_token) AS last_token,
  min(first_ts) AS first_ts, max(last_ts) AS last_ts
FROM tallies GROUP BY counted, stream, instance_name, row_index, start, name

-- name: counts
-- Rows by their index within their token, as input of other queries. The rows of a token
-- are numbered from 0. The number of rows with index ``n`` is the number of tokens with
-- more than ``n`` rows, so batch sizes can be computed without grouping by token.
SELECT * FROM sums WHERE counted = 'rows'

-- name: written
-- The first and the last time of writing.
SELECT min(first_ts) AS first, max(last_ts) AS last FROM counts

-- name: totals
-- The rows and tokens of each writer; ``timed`` is the number of its rows whose time
-- of writing is known.
SELECT stream, instance_name, sum(rows) AS rows,
  coalesce(sum(rows) FILTER (WHERE row_index = 0), 0) AS tokens,
  min(first_token) AS first_token, max(last_token) AS last_token,
  sum(timed) AS timed, min(first_ts) AS first_ts, max(last_ts) AS last_ts
FROM counts GROUP BY stream, instance_name ORDER BY stream, instance_name

-- name: batches
-- The number of tokens by the number of rows that share them: ``bucket`` is the lower
-- bound of the number of rows; the upper bound, which is excluded, is twice as large.
-- The percentiles and ``largest`` are those of the stream.
WITH sizes AS (
  SELECT * FROM (
    SELECT stream, row_index + 1 AS size, rows - coalesce(
      lead(rows) OVER (PARTITION BY stream ORDER BY row_index), 0) AS tokens
    FROM (SELECT stream, row_index, sum(rows) AS rows FROM counts GROUP BY ALL))
  WHERE tokens > 0),
ranked AS (
  SELECT *, sum(tokens) OVER (PARTITION BY stream ORDER BY size)
    / sum(tokens) OVER (PARTITION BY stream) AS share FROM sizes),
described AS (
  SELECT stream, min(size) FILTER (WHERE share >= 0.5) AS p50,
    min(size) FILTER (WHERE share >= 0.99) AS p99, max(size) AS largest
  FROM ranked GROUP BY stream)
SELECT stream, 1 << CAST(floor(log2(size)) AS INT) AS bucket, sum(tokens) AS tokens,
  p50, p99, largest
FROM sizes JOIN described USING (stream) GROUP BY ALL ORDER BY stream, bucket

-- name: over_time
-- The rows of each writer by the window in which they were written.
SELECT stream, instance_name, start div :window * :window AS start, sum(rows) AS rows
FROM sums WHERE counted = 'time' GROUP BY ALL ORDER BY start, stream, instance_name

-- name: counted_names
-- The rooms and users to which rows refer.
SELECT counted AS kind, name, rows FROM sums WHERE counted IN ('room', 'user')

-- name: arrived_names
-- The rooms and users to which recorded rows refer.
SELECT kind, name, count(*) AS rows
FROM arrived LATERAL VIEW stack(2, 'room', room_id, 'user', user_id) AS kind, name
WHERE name IS NOT NULL GROUP BY kind, name

-- name: hottest
-- Those to which the most rows refer; ``:limit`` is the maximum number of rooms, and of
-- users.
SELECT kind, name, rows FROM (
  SELECT *, row_number() OVER (PARTITION BY kind ORDER BY rows DESC, name) AS rank
  FROM names)
WHERE rank <= :limit ORDER BY kind, rows DESC, name

-- name: lines
-- The lines of ``wire`` without their rows, but with the room and the user of each.
-- Rows of events are ["ev", [event_id, room_id, ...]], or [kind, [room_id, ...]]. A
-- row of ``caches`` has its time of writing, in ms. Recordings may have no date; the
-- time since the beginning of the line's recording is then ``passed``, as a time after
-- 1970-01-01. A damaged line's ``t`` means nothing.
SELECT recording, line_number, received_ts, command, stream, instance_name, token,
  prev_token,
  CASE stream
    WHEN 'events' THEN get_json_object(
      row, IF(get_json_object(row, '$[0]') = 'ev', '$[1][1]', '$[1][0]'))
    {rooms} END AS room_id,
  CASE stream {users} END AS user_id,
  IF(stream = 'caches', try_cast(get_json_object(row, '$[2]') AS BIGINT), NULL)
    AS wire_ms,
  IF(is_damaged, NULL, t) AS t
FROM wire

-- name: span
-- The first and the last time of arrival.
SELECT min(received_ts) AS first, max(received_ts) AS last FROM lines

-- name: since_beginning
-- The lines of recordings without a date: ``received_ts`` is the time since the
-- beginning of the line's recording, as a time after 1970-01-01.
SELECT /*+ BROADCAST(begun) */ lines.recording, line_number,
  timestamp_micros(CAST(round((t - first_t) * 1000000) AS BIGINT)) AS received_ts,
  command, stream, instance_name, token, prev_token, room_id, user_id, wire_ms
FROM lines JOIN (SELECT recording, min(t) AS first_t FROM lines GROUP BY recording)
  AS begun ON lines.recording = begun.recording

-- name: arrived
-- The rows that arrived, each with the token of its batch. The token and the time are
-- those of the line that ends the batch, because a reader cannot deliver the batch
-- before that line. If the recording ends within a batch, the rows of that batch have
-- no token and are omitted. The lines are read backwards, because Spark would otherwise
-- read all following lines again for each line.
SELECT recording, stream, instance_name, ending.token AS stream_id,
  ending.received_ts AS received_ts, room_id, user_id, wire_ms
FROM (
  SELECT *, last_value(IF(token IS NULL, NULL, struct(token, received_ts)))
    IGNORE NULLS OVER (
      PARTITION BY recording, stream, instance_name ORDER BY line_number DESC
      ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS ending
  FROM lines WHERE command = 'RDATA')
WHERE ending IS NOT NULL

-- name: arrived_over_time
-- The rows of each writer by the window in which they arrived.
SELECT stream, instance_name,
  unix_micros(received_ts) div (:window * 1000000L) * :window AS start,
  count(*) AS rows
FROM arrived WHERE received_ts IS NOT NULL GROUP BY ALL
ORDER BY start, stream, instance_name

-- name: late
-- The time between the writing and the arrival of each token, in ms. The time of
-- writing comes from the row in the table or, for ``caches``, from the row on the wire.
-- Tokens whose time of writing is unknown are omitted. A lag includes the difference
-- between the clocks of the writer and of the recorder.
WITH tokens AS (
  SELECT recording, stream, instance_name, stream_id, min(received_ts) AS received_ts,
    max(wire_ms) AS wire_ms
  FROM arrived GROUP BY recording, stream, instance_name, stream_id),
written AS (
  SELECT /*+ BROADCAST(seen) */ rows.stream, instance_name, stream_id,
    max(written_ts) AS written_ts
  FROM rows JOIN (
    SELECT stream, min(stream_id) AS low, max(stream_id) AS high
    FROM arrived WHERE stream <> 'caches' GROUP BY stream) AS seen
  ON rows.stream = seen.stream AND stream_id BETWEEN low AND high
  WHERE written_ts IS NOT NULL GROUP BY rows.stream, instance_name, stream_id)
SELECT * FROM (
  SELECT stream, received_ts, try_subtract(unix_micros(received_ts),
    coalesce(try_multiply(wire_ms, 1000L), unix_micros(written_ts))) / 1000 AS lag_ms
  FROM tokens LEFT JOIN written USING (stream, instance_name, stream_id))
WHERE lag_ms IS NOT NULL

-- name: lags
-- Percentiles of lags in ms, by stream, and by stream and window. ``least`` is only
-- negative if the clocks of writer and recorder differ; ``start`` is null for all
-- windows of a stream.
SELECT stream, start, count(*) AS tokens,
  percentile_disc(0.5) WITHIN GROUP (ORDER BY lag_ms) AS p50,
  percentile_disc(0.95) WITHIN GROUP (ORDER BY lag_ms) AS p95,
  percentile_disc(0.99) WITHIN GROUP (ORDER BY lag_ms) AS p99, min(lag_ms) AS least
FROM (
  SELECT stream, lag_ms,
    unix_micros(received_ts) div (:window * 1000000L) * :window AS start
  FROM late)
GROUP BY GROUPING SETS ((stream), (stream, start)) ORDER BY stream, start

-- name: all_events
-- The POSITION lines that reset a stream, or make a reader catch up. Each line is
-- compared with ``known``: the greatest token that a reader has received from the
-- writer in the previous POSITION and since then; it need not be the last one, because
-- ``caches`` may have late rows. If ``token`` is less than ``known``, the writer has
-- reset the stream. Otherwise, if ``prev_token`` is greater than ``known``, the reader
-- has to fetch the rows above ``known``. A POSITION before which the recording has no
-- token of the writer in the stream is neither.
WITH numbered AS (
  SELECT *, count_if(command = 'POSITION') OVER (
    PARTITION BY recording, stream, instance_name ORDER BY line_number) AS span
  FROM lines WHERE command IN ('RDATA', 'POSITION') AND token IS NOT NULL),
spans AS (
  SELECT recording, stream, instance_name, span, max(token) AS reached,
    any_value(struct(line_number, received_ts, prev_token, token))
      FILTER (WHERE command = 'POSITION') AS line
  FROM numbered GROUP BY recording, stream, instance_name, span)
SELECT * FROM (
  SELECT CASE WHEN line.token < known THEN 'reset'
      WHEN line.prev_token > known THEN 'catch-up' END AS kind,
    stream, instance_name, recording, known, line.*
  FROM (
    SELECT *, lag(reached) OVER (
      PARTITION BY recording, stream, instance_name ORDER BY span) AS known
    FROM spans))
WHERE kind IS NOT NULL

-- name: events
-- The newest of these lines.
SELECT * FROM all_events
ORDER BY received_ts DESC NULLS LAST, line_number DESC LIMIT :limit

-- name: event_count
SELECT count(*) AS events FROM all_events

-- name: commands
-- The number of lines of each command; null for lines that cannot be parsed.
SELECT command, count(*) AS lines FROM lines
GROUP BY command ORDER BY lines DESC, command
