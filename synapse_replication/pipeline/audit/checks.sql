-- The audit, in Spark's SQL: the statements of comparison.py.
--
-- The last statements before ``findings``, from ``two_writers``, each return findings
-- of a few kinds, whose columns are those of ``two_writers``. ``all_findings`` is their
-- union. A row of ``findings`` is a finding; the names in braces in its ``message`` are
-- those of its other columns and of the fields of its ``evidence``, which is JSON. The
-- statements read these views:
--
-- * streams: see AuditedStream;
-- * tables and archive: the keys of the rows in the database and in the archive;
-- * wire: recorded lines;
-- * archived_ranges: the range of the archived ids of each stream; purged: ranges that
--   the archive need not contain.
--
-- Theory of operation: a *word* is the presence of 64 consecutive ids of a stream as
-- the bits of one number. A healthy history shrinks 64 times into words before any of
-- it is shuffled, joined or sorted. Nearly all ids of a healthy deployment have one
-- writer and are in all places; only others, and the ends of runs of consecutive ids,
-- are expanded from words to ids.
--
-- The checks of tokens follow the behaviour of readers. In a stream that is stored in
-- the database, a row advances a reader to the row's token. A POSITION whose previous
-- token is lower than its new token is a *claim* that its writer has no rows above the
-- previous token, up to and including the new one; it advances a reader that has
-- reached the previous token to the new token. Readers discard rows at or below their
-- position, except those of idempotent streams. A POSITION whose two tokens are equal
-- is not a claim: readers that are behind the token query the database. A row with that
-- token may follow the POSITION, or the recorder may have missed the row; neither is
-- reported as a fault. Streams held in memory are reset when their writer restarts, so
-- their order is not checked.

-- name: lines
-- Recorded lines, each with what its writer had sent before in the same recording and
-- stream. ``is_repeated`` marks a line that is in the archive again, so that the checks
-- see each line once. ``reached`` is the greatest token of any line before, ``newest``
-- that of a row, with the last line that has it, and ``claimed`` that of a claim.
SELECT recording, line_number, t, stream, instance_name, command = 'RDATA' AS is_row,
  prev_token, token, is_damaged,
  coalesce(lag(line_number) OVER in_order = line_number, false) AS is_repeated,
  lag(token) OVER in_order AS token_before,
  lag(line_number) OVER in_order AS line_number_before,
  max(token) OVER before AS reached,
  max(struct(token, line_number)) FILTER (WHERE command = 'RDATA') OVER before
    AS newest,
  max(token) FILTER (WHERE command = 'POSITION' AND prev_token < token) OVER before
    AS claimed
FROM wire
WINDOW in_order AS (
    PARTITION BY recording, stream, instance_name, token IS NULL ORDER BY line_number),
  before AS (
    PARTITION BY recording, stream, instance_name, token IS NULL ORDER BY line_number
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)

-- name: tokens
SELECT * FROM lines WHERE token IS NOT NULL AND NOT is_repeated

-- name: claims
SELECT * FROM tokens WHERE NOT is_row AND prev_token < token

-- name: spans
-- The lines that cover ids: claims cover those in (prev_token, token], and so do
-- *jumps*, the rows before which other rows may be missing. A late row of an idempotent
-- stream may still arrive for a minute after a claim.
SELECT /*+ BROADCAST(streams), BROADCAST(ends) */ true AS is_claim, claims.stream,
  instance_name, prev_token, token, claims.recording, line_number, t, is_row
FROM claims JOIN streams ON claims.stream = streams.stream
  JOIN (SELECT recording, max(t) AS ended FROM tokens GROUP BY recording) AS ends
  ON claims.recording = ends.recording
WHERE NOT idempotent OR ended - t >= 60
UNION ALL
SELECT /*+ BROADCAST(streams) */ false, tokens.stream, instance_name, reached, token,
  recording, line_number, t, is_row
FROM tokens JOIN streams ON tokens.stream = streams.stream
WHERE NOT idempotent AND is_row AND reached < try_subtract(token, 1)

-- name: words
-- The ids of a writer in 64 consecutive ids: those in the tables (``t``), in the
-- archive (``a``) and on the wire (``w``). ``archived`` is the number of archived rows
-- with the same index; ``reach`` is the last word that a line covers which begins in
-- this one.
SELECT /*+ BROADCAST(streams) */ sightings.stream, word,
  IF(nameless AND is_known, NULL, nullif(instance_name, '')) AS writer,
  t, a, w, archived, low, high, reach
FROM (
  SELECT stream, shiftright(stream_id, 6) AS word, instance_name, source < 2 AS is_known,
    bit_or(IF(source = 0, 1L << CAST(stream_id & 63 AS INT), 0L)) AS t,
    bit_or(IF(source = 1, 1L << CAST(stream_id & 63 AS INT), 0L)) AS a,
    bit_or(IF(source = 2, 1L << CAST(stream_id & 63 AS INT), 0L)) AS w,
    count_if(source = 1) AS archived,
    min(IF(source = 1, stream_id, NULL)) AS low,
    max(IF(source = 1, stream_id, NULL)) AS high,
    max(IF(source = 3, shiftright(token, 6), NULL)) AS reach
  FROM (
    SELECT 0 AS source, stream, instance_name, stream_id, 0 AS row_index, NULL AS token
    FROM tables
    UNION ALL
    SELECT 1, stream, instance_name, stream_id, row_index, NULL FROM archive
    UNION ALL
    SELECT 2, stream, instance_name, token, 0, NULL FROM tokens WHERE is_row
    UNION ALL
    SELECT 3, stream, NULL, prev_token, 0, token FROM spans)
  GROUP BY stream, word, instance_name, is_known, row_index) AS sightings
JOIN streams ON sightings.stream = streams.stream
WHERE persisted

-- name: repeated
-- Words in which the archive has more rows with the same index than ids.
SELECT DISTINCT stream, word FROM words WHERE archived > bit_count(a)

-- name: archive_again
-- The archived rows in these words.
SELECT archive.* FROM archive LEFT SEMI JOIN repeated ON archive.stream = repeated.stream
  AND shiftright(archive.stream_id, 6) = repeated.word

-- name: ids
-- The ids that have to be examined: those that have several writers, are in no table,
-- are missing in the archive's range, were not sent although a line covers them, or are
-- an end of a run of consecutive ids.
SELECT stream, stream_id,
  array_min(filter(writers, each -> (each.known >> bit) & 1 = 1).writer)
    AS first_writer,
  array_max(filter(writers, each -> (each.known >> bit) & 1 = 1).writer) AS last_writer,
  array_min(filter(writers, each -> (each.w >> bit) & 1 = 1).writer) AS sender,
  (t >> bit) & 1 = 1 AS in_tables, (a >> bit) & 1 = 1 AS archived,
  (w >> bit) & 1 = 1 AS sent,
  (starts >> bit) & 1 = 1 AS is_start, (ends >> bit) & 1 = 1 AS is_end
FROM (
  SELECT *, word * 64 + bit AS stream_id
  FROM (
    SELECT /*+ BROADCAST(archived_ranges) */ edges.*, starts | ends
      | IF(of_two_writers, t | a, 0L) | (a | w) & ~t
      | IF(word BETWEEN shiftright(first_token, 6) AND shiftright(last_token, 6),
          t & ~a, 0L)
      | IF(is_covered, (t | a) & ~w, 0L) AS chosen
    FROM (
      SELECT *, max(reach) OVER (PARTITION BY stream ORDER BY word) >= word
          AS is_covered,
        present & ~(shiftrightunsigned(present, 1) | IF(
          lead(word) OVER by_word = word + 1,
          (lead(present) OVER by_word & 1L) << 63, 0L)) AS ends,
        present & ~((present << 1) | IF(
          lag(word) OVER by_word = word - 1,
          shiftrightunsigned(lag(present) OVER by_word, 63), 0L)) AS starts
      FROM (
        SELECT stream, word, bit_or(t) AS t, bit_or(a) AS a, bit_or(w) AS w,
          bit_or(t | a | w) AS present, max(reach) AS reach,
          sum(bit_count(t | a)) FILTER (WHERE writer IS NOT NULL)
            > bit_count(bit_or(t | a) FILTER (WHERE writer IS NOT NULL))
            AS of_two_writers,
          collect_list(struct(writer, t | a AS known, w)) AS writers
        FROM (
          SELECT stream, word, writer, bit_or(t) AS t, bit_or(a) AS a, bit_or(w) AS w,
            max(reach) AS reach
          FROM words GROUP BY stream, word, writer)
        GROUP BY stream, word)
      WINDOW by_word AS (PARTITION BY stream ORDER BY word)) AS edges
    LEFT JOIN archived_ranges ON edges.stream = archived_ranges.stream)
  LATERAL VIEW explode(sequence(0, 63)) AS bit
  WHERE shiftright(chosen, bit) & 1 = 1)

-- name: never_sent
-- Rows that were written, but never sent. Of an id of two writers, none is known. A
-- table that does not record its only writer has rows of that one.
SELECT /*+ BROADCAST(sole) */ ids.stream, stream_id, coalesce(
  IF(first_writer = last_writer, first_writer, NULL), sole.writer) AS instance_name
FROM ids LEFT JOIN (
  SELECT stream, IF(min(writer) = max(writer), min(writer), NULL) AS writer
  FROM (
    SELECT stream, explode(writers) AS writer FROM streams WHERE nameless
    UNION ALL
    SELECT /*+ BROADCAST(streams) */ tokens.stream, instance_name
    FROM tokens JOIN streams ON tokens.stream = streams.stream WHERE nameless)
  GROUP BY stream) AS sole
ON ids.stream = sole.stream
WHERE NOT sent AND (in_tables OR archived)

-- name: covered
-- The rows that were never sent although a line covers them, with that line. If any
-- line of a writer covers an id, the line with the greatest token of those that begin
-- below the id does: the running maximum in the order of ids and of beginnings.
SELECT is_claim, stream, instance_name, stream_id, span.*
FROM (
  SELECT *, max(begun) OVER (
    PARTITION BY is_claim, stream, instance_name ORDER BY place, stream_id NULLS LAST
    ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS span
  FROM (
    SELECT /*+ BROADCAST(unsent) */ is_claim, spans.stream, spans.instance_name,
      prev_token AS place, NULL AS stream_id,
      struct(token, recording, line_number, t, is_row, prev_token) AS begun
    FROM spans LEFT SEMI JOIN (SELECT DISTINCT stream, instance_name FROM never_sent)
      AS unsent
    ON spans.stream = unsent.stream AND spans.instance_name = unsent.instance_name
    UNION ALL
    SELECT is_claim, stream, instance_name, stream_id, stream_id, NULL
    FROM never_sent LATERAL VIEW explode(array(true, false)) AS is_claim))
WHERE stream_id IS NOT NULL AND span.token >= stream_id

-- name: late
-- Rows at or below a token that readers have already reached.
SELECT /*+ BROADCAST(streams) */ tokens.*, idempotent
FROM tokens JOIN streams ON tokens.stream = streams.stream
WHERE persisted AND is_row AND (token <= newest.token OR token <= claimed)

-- name: judged
-- Late rows, with the line that readers had reached before. A claim whose previous
-- token is at or above a row's token does not make the row late: a reader that has not
-- received the row queries the database when the claim arrives.
SELECT *, CASE WHEN idempotent THEN 'late_invalidation'
  WHEN behind_line = first_line THEN 'row_twice_on_wire'
  ELSE 'row_out_of_order' END AS kind
FROM (
  SELECT late.*, first_line, coalesce(IF(first_line < late.line_number, first_line, NULL),
    IF(token < newest.token, newest.line_number, NULL), claim_line) AS behind_line
  FROM late LEFT JOIN (
    SELECT /*+ BROADCAST(writers) */ recording, tokens.stream, tokens.instance_name,
      token, min(line_number) AS first_line
    FROM tokens LEFT SEMI JOIN (SELECT DISTINCT stream, instance_name FROM late)
      AS writers
    ON tokens.stream = writers.stream AND tokens.instance_name = writers.instance_name
    WHERE is_row GROUP BY recording, tokens.stream, tokens.instance_name, token)
  USING (recording, stream, instance_name, token)
  LEFT JOIN (
    SELECT late.recording, late.line_number, min(claims.line_number) AS claim_line
    FROM late JOIN claims ON late.recording = claims.recording
      AND late.stream = claims.stream AND late.instance_name = claims.instance_name
      AND claims.line_number < late.line_number
      AND claims.prev_token < late.token AND late.token <= claims.token
    -- Other rows are behind a row.
    WHERE late.newest IS NULL OR late.token > late.newest.token
    GROUP BY late.recording, late.line_number) AS claiming
  ON late.recording = claiming.recording AND late.line_number = claiming.line_number)
WHERE behind_line IS NOT NULL

-- name: farthest
-- The greatest token of each writer in recordings and in the archive.
SELECT stream, instance_name, max(token) AS last_token, false AS in_archive
FROM tokens GROUP BY stream, instance_name
UNION ALL
SELECT stream, writer, max(high), true
FROM words WHERE high IS NOT NULL GROUP BY stream, writer

-- name: ahead
SELECT /*+ BROADCAST(streams) */ farthest.*, last_allocated
FROM farthest JOIN streams ON farthest.stream = streams.stream
WHERE last_allocated IS NOT NULL AND last_token > greatest(last_allocated, 1)

-- name: two_writers
-- Ids that two writers have used.
SELECT 'id_of_two_writers' AS kind, stream, first_writer AS instance_name,
  min(stream_id) AS first_token, max(stream_id) AS last_token, count(*) AS count,
  '{count} ids of {stream} belong to {instance_name} and to {writers[1]}: the ' ||
    'sequence allocated them twice' AS message,
  to_json(struct(array(first_writer, last_writer) AS writers, min_by(
    struct(stream_id, in_tables, archived, sent), stream_id, 10) AS ids)) AS evidence
FROM ids WHERE first_writer < last_writer GROUP BY stream, first_writer, last_writer

-- name: rows_gone
-- Ids that were sent or archived, but have no row in a table any more.
SELECT 'row_gone', stream, coalesce(first_writer, sender) AS writer, min(stream_id),
  max(stream_id), count(*),
  '{count} ids of {stream} that {instance_name} wrote or sent have no rows any more: ' ||
    'the rows were replaced by newer rows, or deleted',
  to_json(struct(min_by(struct(stream_id, in_tables, archived, sent), stream_id, 10)
    AS ids))
FROM ids WHERE NOT in_tables GROUP BY stream, writer

-- name: gaps
-- Ids without a row of any writer in any source. All writers of a stream take ids from
-- one sequence, so a gap between the ids of one writer usually contains ids of others.
-- Ids above the greatest known id are not reported: their transactions may be in
-- progress. The newest gaps of a stream are findings of their own; one finding
-- summarises all others. Recordings may have any token: at most 2^63 - 1 ids count.
SELECT 'id_without_row', stream, NULL, min(before.stream_id) + 1,
  max(after.stream_id) - 1, coalesce(try_sum(size), 9223372036854775807L),
  '{count} ids of {stream} in {gaps} gaps have no row of any writer: rolled back, ' ||
    'replaced, deleted, or lost',
  to_json(struct(min(before) AS before, max(after) AS after, count(*) AS gaps))
FROM (
  SELECT *, coalesce(try_subtract(after.stream_id - 1, before.stream_id),
    9223372036854775807L) AS size, least(:gaps + 1,
    row_number() OVER (PARTITION BY stream ORDER BY before.stream_id DESC)) AS rank
  FROM (
    SELECT stream, is_end,
      struct(stream_id, coalesce(first_writer, sender) AS writer) AS before,
      lead(struct(stream_id, coalesce(first_writer, sender) AS writer))
        OVER (PARTITION BY stream ORDER BY stream_id) AS after
    FROM ids WHERE is_start OR is_end)
  WHERE is_end AND after IS NOT NULL)
GROUP BY stream, rank

-- name: tokens_ahead
-- Tokens beyond the last id that the stream's sequence has allocated: the audited
-- database is not the one that allocated the token, or it lost its latest changes. A
-- database that lost its latest changes will allocate ids that have been used before.
-- The position of a stream that was never written is 1, whatever its sequence's value.
SELECT 'token_ahead', stream, instance_name, last_allocated + 1, last_token,
  last_token - last_allocated,
  '{seen[recording]} has {instance_name}''s {stream} at {last_token}, but the ' ||
    'database has allocated ids only up to {sequence_value}: the database was ' ||
    'restored to an earlier state, or is another one',
  to_json(struct(seen, last_allocated AS sequence_value))
FROM (
  SELECT ahead.stream, ahead.instance_name, last_token, last_allocated,
    min(IF(in_archive, struct('the archive' AS recording, NULL AS line_number,
      NULL AS line), struct(recording, line_number, CASE
      WHEN is_row THEN
        concat_ws(' ', 'RDATA', tokens.stream, tokens.instance_name, token, '...')
      ELSE concat_ws(' ', 'POSITION', tokens.stream, tokens.instance_name, prev_token,
        token)
      END AS line))) AS seen
  FROM ahead LEFT JOIN tokens ON NOT in_archive AND ahead.stream = tokens.stream
    AND ahead.instance_name = tokens.instance_name AND token = last_token
  GROUP BY ahead.stream, ahead.instance_name, last_token, last_allocated, in_archive)

-- name: damaged_records
-- Invalid records. If the only one is the last line, the file was still being written,
-- or its recorder was killed.
SELECT IF(first_line_number = lines, 'recording_cut_off', 'recording_damaged'), NULL,
  NULL, NULL, NULL, damaged,
  IF(first_line_number = lines,
    '{recording} line {first_line_number}: the last line is incomplete; the ' ||
      'recorder was still writing, or was killed',
    '{recording} line {first_line_number}: not a record; its content is unknown'),
  to_json(struct(recording, first_line_number, last_line_number, lines))
FROM (
  SELECT recording, count_if(is_damaged) AS damaged, max(line_number) AS lines,
    min(line_number) FILTER (WHERE is_damaged) AS first_line_number,
    max(line_number) FILTER (WHERE is_damaged) AS last_line_number
  FROM lines WHERE NOT is_repeated GROUP BY recording)
WHERE damaged > 0

-- name: late_rows
-- Late rows.
SELECT kind, stream, instance_name, min(token), max(token), count(*),
  '{recording}: {count} of {instance_name}''s {stream} rows were sent ' || CASE kind
    WHEN 'late_invalidation' THEN
      'out of order or repeatedly; late rows of this stream are delivered'
    WHEN 'row_twice_on_wire' THEN 'repeatedly; readers discard the repetitions'
    ELSE 'after readers had advanced to their tokens or beyond; readers have lost them'
    END,
  to_json(struct(recording, min_by(struct(line_number,
    concat_ws(' ', 'RDATA', stream, instance_name, token, '...') AS line, behind_line),
    line_number, 10) AS lines))
FROM judged GROUP BY kind, recording, stream, instance_name

-- name: resets
-- The lines at which a writer reset a stream to a lower token. In a stream that is not
-- held in memory, a POSITION with a lower token than a row that was sent shows that
-- the writer restarted from its persisted position.
SELECT /*+ BROADCAST(streams) */ 'stream_reset', tokens.stream, instance_name, token,
  token_before, 1,
  '{recording} line {line_number}: {instance_name} reset {stream} to {first_token} ' ||
    'from {token_before}',
  to_json(struct(recording, line_number, CASE
    WHEN is_row THEN
      concat_ws(' ', 'RDATA', tokens.stream, instance_name, token, '...')
    ELSE concat_ws(' ', 'POSITION', tokens.stream, instance_name, prev_token, token)
    END AS line, line_number_before, token_before))
FROM tokens LEFT JOIN streams ON tokens.stream = streams.stream
WHERE token < token_before AND (coalesce(in_memory, false)
  OR NOT is_row AND prev_token = token AND token < newest.token)

-- name: rows_not_sent
-- Rows that were never sent although a line covers them.
--
-- A reader that received a later row of the writer, but not the missing row, has
-- skipped the missing row. However, the recorder may be the only one that did not
-- receive it.
--
-- ``POSITION stream writer prev new`` states that the writer has no rows in ``(prev,
-- new]``. If the tables or the archive have such a row, and the writer never sent it,
-- then every reader whose position was ``prev`` has permanently skipped that row. The
-- POSITION and the row prove this even if the recording is incomplete, because
-- ``prev`` is at or above every token that the writer has sent before.
SELECT IF(is_claim, 'announced_absent', 'row_not_seen'), stream, instance_name,
  min(stream_id), max(stream_id), count(*),
  IF(is_claim, '{recording} line {line_number}: ''{line}'' skips {count} ids with ' ||
      'committed rows that were never sent; the first is {first_token}: readers have ' ||
      'lost these rows',
    '{recording}: {count} ids of {instance_name}''s {stream} are missing between ' ||
      'recorded ids: the recorder was disconnected, or the rows were lost in transit'),
  IF(is_claim,
    to_json(struct(recording, claim.line_number, claim.t,
      concat_ws(' ', 'POSITION', stream, instance_name, claim.prev_token, claim.token)
      AS line, min_by(stream_id, stream_id, 10) AS ids)),
    to_json(struct(recording, min_by(struct(stream_id, prev_token AS token_before,
      line_number, concat_ws(' ', 'RDATA', stream, instance_name, token, '...') AS line),
      stream_id, 10) AS ids)))
FROM (SELECT *, IF(is_claim, struct(line_number, t, prev_token, token), NULL) AS claim
  FROM covered)
GROUP BY is_claim, recording, claim, stream, instance_name

-- name: rows_again
-- Rows that an archive contains more than once. ``archive_again`` has the rows of the
-- words that are repeated.
SELECT 'row_twice_in_archive', stream, instance_name, min(stream_id), max(stream_id),
  count(*),
  'the archive contains {count} rows of {instance_name}''s {stream} more than once',
  to_json(struct(min_by(struct(stream_id, row_index, times),
    struct(stream_id, row_index), 10) AS rows))
FROM (
  SELECT stream, nullif(instance_name, '') AS instance_name, stream_id, row_index,
    count(*) AS times
  FROM archive_again GROUP BY ALL HAVING times > 1)
GROUP BY stream, instance_name

-- name: rows_not_archived
-- Ids that have a row in the tables, but none in the archive. The archive job reads
-- the rows of each writer in order, and only up to a token at or below which no
-- further row can appear. Between the least and the greatest archived token of a
-- writer, the archive therefore has each row of this writer, except purged rows. Rows
-- without a writer form a group of their own.
SELECT /*+ BROADCAST(reach), BROADCAST(purged) */ 'row_not_archived', ids.stream,
  ids.first_writer, min(stream_id), max(stream_id), count(*),
  '{count} ids of {instance_name}''s {stream} have a row in the tables but none in ' ||
    'the archive, which has older and newer rows of this writer',
  to_json(struct(min_by(stream_id, stream_id, 10) AS ids))
FROM ids JOIN (
  SELECT stream, writer, min(low) AS low, max(high) AS high
  FROM words WHERE low IS NOT NULL GROUP BY stream, writer) AS reach
ON ids.stream = reach.stream AND ids.first_writer <=> reach.writer
  AND stream_id BETWEEN low AND high
LEFT ANTI JOIN purged ON purged.stream = ids.stream
  AND ids.stream_id BETWEEN purged.first_token AND purged.last_token
WHERE in_tables AND NOT archived GROUP BY ids.stream, ids.first_writer

-- name: lines_again
-- Lines of recordings that an archive contains more than once.
SELECT 'command_twice_in_archive', NULL, NULL, NULL, NULL, count(DISTINCT line_number),
  'the archive contains {count} lines of the recording {recording} more than once',
  to_json(struct(recording, min(line_number) AS first_line_number,
    max(line_number) AS last_line_number))
FROM lines WHERE is_repeated GROUP BY recording

-- name: findings
-- At most :findings findings of a kind and stream are listed, so that their number has
-- a bound; one further finding summarises all others. Unknown streams, of which a
-- recording may have any number, share one bound.
SELECT kind, any_value(IF(is_listed, stream, known)) AS stream,
  any_value(IF(is_listed, instance_name, NULL)) AS instance_name,
  min(first_token) AS first_token, max(last_token) AS last_token, sum(count) AS count,
  any_value(IF(is_listed, message, '{count} rows, ids or lines of {findings} further ' ||
    'findings of this kind, which are not listed individually')) AS message,
  any_value(IF(is_listed, evidence, to_json(struct(findings)))) AS evidence
FROM (
  SELECT *, rank <= :findings AS is_listed,
    count(*) OVER (PARTITION BY kind, known, rank) AS findings
  FROM (
    SELECT /*+ BROADCAST(streams) */ all_findings.*, streams.stream AS known,
      least(:findings + 1, row_number() OVER (PARTITION BY kind, streams.stream
        ORDER BY first_token, last_token, instance_name, evidence)) AS rank
    FROM all_findings LEFT JOIN streams ON all_findings.stream = streams.stream))
GROUP BY kind, known, rank
