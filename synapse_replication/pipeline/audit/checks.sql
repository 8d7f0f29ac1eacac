-- The checks of an audit: queries for DuckDB.
--
-- A row of a check is a finding. Its columns kind, message (the sentence for display,
-- with the names of other columns in braces), evidence, stream, instance_name,
-- first_token, last_token and count become the fields of the finding; the last five are
-- optional. The queries read these tables and views:
--
-- * streams: stream, persisted (in the database), idempotent (late rows are delivered),
--   in_memory (tokens start again when the writer restarts), last_allocated (by the
--   sequence), sole_writer (of a stream with a single writer, if a table does not
--   record it) and tables;
-- * ids: see columns/ids.csv;
-- * wire: recorded lines; tokens and claims: those with tokens;
-- * lost: ids that a POSITION has skipped; texts: some rows with these ids;
-- * archived: archived rows of ids that are repeated; purged: the ranges that the
--   archive need not contain.
--
-- Theory of operation: the checks of tokens follow the behaviour of readers. In a
-- stream that is stored in the database, a row advances a reader to the row's token. A
-- POSITION whose previous token is lower than its new token is a *claim* that its
-- writer has no rows above the previous token, up to and including the new one; it
-- advances a reader that has reached the previous token to the new token. Readers
-- discard rows at or below their position, except those of idempotent streams. A
-- POSITION whose two tokens are equal is not a claim: readers that are behind the token
-- query the database. A row with that token may follow the POSITION, or the recorder
-- may have missed the row; neither is reported as a fault. Streams held in memory are
-- reset when their writer restarts, so their order is not checked.

-- name: tokens
-- Creates the constants, the views of recorded tokens, and the table of streams.

-- The maximum number of lines, rows or ids in the evidence of a finding.
CREATE MACRO samples() AS 10;

-- The number of a stream's newest gaps that are reported individually. One finding
-- summarises all other gaps of the stream.
CREATE MACRO max_gaps() AS 1000;

-- How long after a POSITION a late row of an idempotent stream may arrive, in s.
CREATE MACRO patience() AS 60;

CREATE MACRO line_of(is_row, stream, instance_name, prev_token, token) AS
  if(is_row, concat_ws(' ', 'RDATA', stream, instance_name, token, '...'),
     concat_ws(' ', 'POSITION', stream, instance_name, prev_token, token));
CREATE VIEW tokens AS
  SELECT recording, line_number, t, stream, instance_name, command = 'RDATA' AS is_row,
    prev_token, token
  FROM wire WHERE command IN ('RDATA', 'POSITION') AND token IS NOT NULL;
CREATE VIEW claims AS SELECT * FROM tokens WHERE NOT is_row AND prev_token < token;
CREATE TABLE streams (
  stream TEXT, persisted BOOLEAN, in_memory BOOLEAN, idempotent BOOLEAN,
  tables TEXT[], last_allocated BIGINT, sole_writer TEXT);

-- name: views
-- Creates the other views, macros and tables that the checks use.
-- Rows that were written, but never sent. Of an id of two writers, none is known.
CREATE VIEW never_sent AS
  SELECT stream, stream_id, coalesce(
    if(first_writer = last_writer, first_writer, NULL), sole_writer) AS instance_name
  FROM ids JOIN streams USING (stream)
  WHERE NOT sent AND (in_tables OR archived);

-- The ids that a line covers: those in (prev_token, token]. If any line of a writer
-- covers an id, the line with the greatest token of those that begin below the id does.
CREATE MACRO covered(spans) AS TABLE
  WITH reach AS (
    SELECT stream, instance_name, prev_token AS begun, max(struct_pack(
        token := token, recording := recording, line_number := line_number, t := t,
        is_row := is_row, prev_token := prev_token)) OVER (
      PARTITION BY stream, instance_name ORDER BY prev_token) AS span
    FROM query_table(spans))
  SELECT never_sent.*, unnest(span)
  FROM never_sent ASOF JOIN reach ON never_sent.stream = reach.stream
    AND never_sent.instance_name = reach.instance_name
    AND never_sent.stream_id > reach.begun
  WHERE span.token >= stream_id;

-- A late row of an idempotent stream may still arrive.
CREATE VIEW final_claims AS
  SELECT claims.* FROM claims JOIN streams USING (stream)
    JOIN (SELECT recording, max(t) AS ended FROM tokens GROUP BY recording)
    USING (recording)
  WHERE NOT idempotent OR ended - t >= patience();

-- Rows before which other rows may be missing.
CREATE VIEW jumps AS
  SELECT * FROM (
    SELECT * REPLACE (max(token) OVER (
      PARTITION BY recording, stream, instance_name ORDER BY line_number
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS prev_token)
    FROM tokens JOIN streams USING (stream) WHERE NOT idempotent)
  WHERE is_row AND prev_token < token - 1;

-- The committed rows whose absence a POSITION has announced, with that line.
CREATE TABLE lost AS FROM covered('final_claims');

-- The first few ids that each POSITION has skipped, and their rows.
CREATE TABLE sampled AS SELECT DISTINCT stream, stream_id FROM lost
  QUALIFY row_number() OVER (
    PARTITION BY recording, line_number ORDER BY stream_id) <= samples();
CREATE TABLE texts (
  stream TEXT, stream_id BIGINT, row_index INTEGER, "row" TEXT, source TEXT);

-- Archived rows of ids that are ``repeated``, and the ranges of tokens that the archive
-- need not contain.
CREATE TABLE archived (
  stream TEXT, instance_name TEXT, stream_id BIGINT, row_index INTEGER);
CREATE TABLE purged (stream TEXT, first_token BIGINT, last_token BIGINT);

-- name: two_writers
-- Ids that two writers have used.
SELECT *,
  'id_of_two_writers' AS kind,
  '{count} ids of {stream} belong to {instance_name} and to ' ||
    '{last_writer}: the sequence allocated them twice' AS message,
  {writers: writers, ids: ids} AS evidence
FROM (
  SELECT stream, first_writer AS instance_name, last_writer,
    min(stream_id) AS first_token, max(stream_id) AS last_token, count(*) AS count,
    [first_writer, last_writer] AS writers,
    arg_min({stream_id: stream_id, in_tables: in_tables, archived: archived,
      sent: sent}, stream_id, samples()) AS ids
  FROM ids WHERE first_writer < last_writer GROUP BY stream, first_writer, last_writer)

-- name: gone
-- Ids that were sent or archived, but have no row in a table any more.
SELECT *,
  'row_gone' AS kind,
  '{count} ids of {stream} that {instance_name} wrote or sent have no ' ||
    'rows any more: the rows were replaced by newer rows, or deleted' AS message,
  {ids: ids} AS evidence
FROM (
  SELECT stream, coalesce(first_writer, sender) AS instance_name,
    min(stream_id) AS first_token, max(stream_id) AS last_token, count(*) AS count,
    arg_min({stream_id: stream_id, in_tables: in_tables, archived: archived,
      sent: sent}, stream_id, samples()) AS ids
  FROM ids WHERE NOT in_tables GROUP BY ALL)

-- name: gaps
-- Ids without a row of any writer in any source. All writers of a stream take ids from
-- one sequence, so a gap between the ids of one writer usually contains ids of others.
-- Ids above the greatest known id are not reported: their transactions may be in
-- progress. The runs of two tasks may be adjacent, with no gap between them.
SELECT *,
  'id_without_row' AS kind,
  '{count} ids of {stream} in {gaps} gaps have no row of any writer: ' ||
    'rolled back, replaced, deleted, or lost' AS message,
  {"before": "before", "after": "after", gaps: gaps} AS evidence
FROM (
  WITH runs AS (
    SELECT stream, {stream_id: run_last, writer: run_last_writer} AS before,
      lead({stream_id: stream_id, writer: coalesce(first_writer, sender)})
        OVER (PARTITION BY stream ORDER BY stream_id) AS after
    FROM ids WHERE run_last IS NOT NULL),
  ranked AS (
    SELECT *, after.stream_id - before.stream_id - 1 AS size, least(max_gaps() + 1,
      row_number() OVER (PARTITION BY stream ORDER BY before DESC)) AS rank
    FROM runs WHERE after.stream_id > before.stream_id + 1)
  SELECT stream, arg_min(before, before.stream_id) AS before,
    arg_max(after, after.stream_id) AS after,
    min(before.stream_id) + 1 AS first_token, max(after.stream_id) - 1 AS last_token,
    sum(size)::BIGINT AS count, count(*) AS gaps
  FROM ranked GROUP BY stream, rank)

-- name: ahead
-- Tokens beyond the last id that the stream's sequence has allocated: the audited
-- database is not the one that allocated the token, or it lost its latest changes. A
-- database that lost its latest changes will allocate ids that have been used before.
-- The position of a stream that was never written is 1, whatever its sequence's value.
SELECT *,
  'token_ahead' AS kind,
  '{place} has {instance_name}''s {stream} at {last_token}, but the ' ||
    'database has allocated ids only up to {sequence_value}: the database ' ||
    'was restored to an earlier state, or is another one' AS message,
  {seen: seen, sequence_value: sequence_value} AS evidence
FROM (
  WITH farthest AS (
    SELECT stream, instance_name, max(token) AS last_token, false AS in_archive
    FROM tokens GROUP BY ALL
    UNION ALL
    SELECT stream, first_writer, max(stream_id), true FROM ids WHERE archived
    GROUP BY ALL),
  ahead AS (
    SELECT farthest.*, last_allocated AS sequence_value,
      last_allocated + 1 AS first_token, last_token - last_allocated AS count
    FROM farthest JOIN streams USING (stream)
    WHERE last_allocated IS NOT NULL AND last_token > greatest(last_allocated, 1)),
  lines AS (
    SELECT stream, instance_name, token AS last_token, false AS in_archive,
      min({recording: recording, line_number: line_number, line: line_of(
        is_row, stream, instance_name, prev_token, token)}) AS seen
    FROM tokens SEMI JOIN ahead ON tokens.stream = ahead.stream
      AND tokens.instance_name = ahead.instance_name AND token = last_token
    GROUP BY ALL)
  SELECT ahead.*, coalesce(seen, {recording: 'the archive', line_number: NULL,
    line: NULL}) AS seen, coalesce(seen.recording, 'the archive') AS place
  FROM ahead LEFT JOIN lines USING (stream, instance_name, last_token, in_archive))

-- name: damage
-- Invalid records. If the only one is the last line, the file was still being written,
-- or its recorder was killed.
SELECT *,
  '{recording} line {first_line_number}: {what}' AS message,
  {recording: recording, first_line_number: first_line_number,
    last_line_number: last_line_number, "lines": "lines"} AS evidence
FROM (
  SELECT recording, count(*) FILTER (is_damaged) AS count, max(line_number) AS lines,
    min(line_number) FILTER (is_damaged) AS first_line_number,
    max(line_number) FILTER (is_damaged) AS last_line_number,
    if(first_line_number = lines, 'recording_cut_off', 'recording_damaged') AS kind,
    if(first_line_number = lines,
      'the last line is incomplete; the recorder was still writing, or was killed',
      'not a record; its content is unknown') AS what
  FROM wire GROUP BY recording HAVING count > 0)

-- name: order
-- Late rows: rows at or below a token that readers have already reached. A claim whose
-- previous token is at or above a row's token does not make the row late: a reader
-- that has not received the row queries the database when the claim arrives.
SELECT *,
  '{recording}: {count} of {instance_name}''s {stream} rows were sent ' ||
    '{how}' AS message,
  {recording: recording, "lines": "lines"} AS evidence
FROM (
  WITH passed AS (
    SELECT *, max(token) FILTER (is_row) OVER before AS row_before,
      max(token) FILTER (NOT is_row AND prev_token < token) OVER before AS claimed
    FROM tokens JOIN streams USING (stream) WHERE persisted
    WINDOW before AS (PARTITION BY recording, stream, instance_name
      ORDER BY line_number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)),
  late AS (
    SELECT * FROM passed WHERE is_row AND (token <= row_before OR token <= claimed)),
  -- Usually only a few lines are late, so the joins are cheap.
  same AS (
    SELECT late.recording, late.line_number, min(other.line_number) AS first_line
    FROM late JOIN tokens AS other USING (recording, stream, instance_name, token)
    WHERE other.is_row AND other.line_number < late.line_number GROUP BY ALL),
  newer AS (
    SELECT late.recording, late.line_number, max(other.line_number) AS newer_line
    FROM late JOIN tokens AS other ON late.recording = other.recording
      AND late.stream = other.stream AND late.instance_name = other.instance_name
      AND late.row_before = other.token
    WHERE other.is_row AND other.line_number < late.line_number
      AND late.token < late.row_before GROUP BY ALL),
  claiming AS (
    SELECT late.recording, late.line_number, min(claims.line_number) AS claim_line
    FROM late JOIN claims USING (recording, stream, instance_name)
    WHERE late.token <= late.claimed AND claims.line_number < late.line_number
      AND claims.prev_token < late.token AND late.token <= claims.token
    GROUP BY ALL),
  judged AS (
    SELECT *, coalesce(first_line, newer_line, claim_line) AS behind_line, CASE
      WHEN idempotent THEN 'late_invalidation'
      WHEN first_line IS NOT NULL THEN 'row_twice_on_wire'
      ELSE 'row_out_of_order' END AS kind
    FROM late LEFT JOIN same USING (recording, line_number)
      LEFT JOIN newer USING (recording, line_number)
      LEFT JOIN claiming USING (recording, line_number))
  SELECT kind, recording, stream, instance_name, min(token) AS first_token,
    max(token) AS last_token, count(*) AS count,
    arg_min({line_number: line_number,
      line: line_of(is_row, stream, instance_name, prev_token, token),
      behind_line: behind_line}, line_number, samples()) AS lines,
    CASE kind
      WHEN 'late_invalidation' THEN
        'out of order or repeatedly; late rows of this stream are delivered'
      WHEN 'row_twice_on_wire' THEN 'repeatedly; readers discard the repetitions'
      ELSE 'after readers had advanced to their tokens or beyond; readers have lost '
        'them' END AS how
  FROM judged WHERE behind_line IS NOT NULL
  GROUP BY kind, recording, stream, instance_name)

-- name: reset
-- The lines at which a writer reset a stream to a lower token. In a stream that is not
-- held in memory, a POSITION with a lower token than a row that was sent shows that
-- the writer restarted from its persisted position.
SELECT *,
  'stream_reset' AS kind,
  '{recording} line {line_number}: {instance_name} reset {stream} to ' ||
    '{token} from {token_before}' AS message,
  {recording: recording, line_number: line_number, line: line,
    line_number_before: line_number_before, token_before: token_before} AS evidence
FROM (
  SELECT *, token AS first_token, token_before AS last_token,
    line_of(is_row, stream, instance_name, prev_token, token) AS line
  FROM (
    SELECT *, lag(token) OVER in_order AS token_before,
      lag(line_number) OVER in_order AS line_number_before,
      max(token) FILTER (is_row) OVER (in_order
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS row_before
    FROM tokens LEFT JOIN streams USING (stream)
    WINDOW in_order AS (
      PARTITION BY recording, stream, instance_name ORDER BY line_number))
  WHERE token < token_before AND (coalesce(in_memory, false)
    OR NOT is_row AND prev_token = token AND token < row_before))

-- name: not_seen
-- A reader that received a later row of the writer, but not the missing row, has
-- skipped the missing row. However, the recorder may be the only one that did not
-- receive it.
SELECT *,
  'row_not_seen' AS kind,
  '{recording}: {count} ids of {instance_name}''s {stream} are missing ' ||
    'between recorded ids: the recorder was disconnected, or the rows were ' ||
    'lost in transit' AS message,
  {recording: recording, ids: ids} AS evidence
FROM (
  SELECT recording, stream, instance_name, min(stream_id) AS first_token,
    max(stream_id) AS last_token, count(*) AS count,
    arg_min({stream_id: stream_id, token_before: prev_token,
      line_number: line_number, line: line_of(
        is_row, stream, instance_name, prev_token, token)},
      stream_id, samples()) AS ids
  FROM covered('jumps') GROUP BY recording, stream, instance_name)

-- name: announced_absent
-- ``POSITION stream writer prev new`` states that the writer has no rows in ``(prev,
-- new]``. If the tables or the archive have such a row, and the writer never sent it,
-- then every reader whose position was ``prev`` has permanently skipped that row. The
-- POSITION and the row prove this even if the recording is incomplete, because
-- ``prev`` is at or above every token that the writer has sent before.
SELECT *,
  'announced_absent' AS kind,
  '{recording} line {line_number}: ''{line}'' skips {count} ids with ' ||
    'committed rows that were never sent; the first is {first_token}: ' ||
    'readers have lost these rows' AS message,
  {recording: recording, line_number: line_number, t: t, line: line, tables: tables,
    "rows": "rows"} AS evidence
FROM (
  SELECT stream, instance_name, recording, line_number, t,
    line_of(is_row, stream, instance_name, prev_token, token) AS line,
    min(stream_id) AS first_token, max(stream_id) AS last_token,
    count(DISTINCT stream_id) AS count, any_value(tables) AS tables,
    list({stream_id: stream_id, source: source, row_index: row_index, row: "row"}
      ORDER BY rank) FILTER (rank <= samples()) AS rows
  FROM (
    SELECT *, row_number() OVER (PARTITION BY recording, line_number, instance_name
      ORDER BY stream_id, source, row_index) AS rank
    FROM lost LEFT JOIN texts USING (stream, stream_id) JOIN streams USING (stream))
  GROUP BY stream, instance_name, recording, line_number, t, is_row, prev_token, token)

-- name: rows_twice
-- Rows that an archive contains more than once.
SELECT *,
  'row_twice_in_archive' AS kind,
  'the archive contains {count} rows of {instance_name}''s {stream} more ' ||
    'than once' AS message,
  {"rows": "rows"} AS evidence
FROM (
  SELECT stream, instance_name, min(stream_id) AS first_token,
    max(stream_id) AS last_token, count(*) AS count,
    arg_min({stream_id: stream_id, row_index: row_index, times: times},
      {stream_id: stream_id, row_index: row_index}, samples()) AS rows
  FROM (
    SELECT stream, instance_name, stream_id, row_index, count(*) AS times
    FROM archived SEMI JOIN (FROM ids WHERE repeated) USING (stream, stream_id)
    GROUP BY ALL HAVING times > 1)
  GROUP BY stream, instance_name)

-- name: not_archived
-- Ids that have a row in the tables, but none in the archive. The archive job reads
-- the rows of each writer in order, and only up to a token at or below which no
-- further row can appear. Between the least and the greatest archived token of a
-- writer, the archive therefore has each row of this writer, except purged rows. Rows
-- without a writer form a group of their own.
SELECT *,
  'row_not_archived' AS kind,
  '{count} ids of {instance_name}''s {stream} have a row in the tables ' ||
    'but none in the archive, which has older and newer rows of this writer' AS message,
  {ids: ids} AS evidence
FROM (
  SELECT ids.stream, ids.first_writer AS instance_name, min(stream_id) AS first_token,
    max(stream_id) AS last_token, count(*) AS count, min(stream_id, samples()) AS ids
  FROM ids JOIN (
    SELECT stream, first_writer, min(stream_id) AS low, max(stream_id) AS high
    FROM ids WHERE archived GROUP BY ALL) AS reach
  ON ids.stream = reach.stream
    AND ids.first_writer IS NOT DISTINCT FROM reach.first_writer
    AND ids.stream_id BETWEEN low AND high
  WHERE in_tables AND NOT archived AND NOT EXISTS (
    FROM purged WHERE purged.stream = ids.stream
      AND ids.stream_id BETWEEN purged.first_token AND purged.last_token)
  GROUP BY ids.stream, ids.first_writer)

-- name: commands_twice
-- Lines of recordings that an archive contains more than once.
SELECT *,
  'command_twice_in_archive' AS kind,
  'the archive contains {count} lines of the recording {recording} more ' ||
    'than once' AS message,
  {recording: recording, first_line_number: first_line_number,
    last_line_number: last_line_number} AS evidence
FROM (
  SELECT recording, min(line_number) AS first_line_number,
    max(line_number) AS last_line_number, count(*) AS count
  FROM (SELECT recording, line_number FROM wire GROUP BY ALL HAVING count(*) > 1)
  GROUP BY recording)
