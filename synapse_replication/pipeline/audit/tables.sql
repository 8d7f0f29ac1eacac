-- Fills the tables that the checks read (see checks.sql), and queries them for the reads
-- that follow.

-- name: each_line_once
CREATE OR REPLACE TABLE wire AS
SELECT DISTINCT ON (recording, line_number) * FROM wire

-- name: sent
SELECT stream, instance_name, token AS stream_id, 0::INTEGER AS row_index
FROM tokens WHERE is_row

-- name: senders
SELECT DISTINCT stream, instance_name FROM tokens

-- name: add_stream
INSERT INTO streams VALUES (?, ?, ?, ?, ?, ?, ?)

-- name: received
-- The least and the greatest received token of each stream.
SELECT stream, min(least(prev_token, token)), max(token) FROM tokens GROUP BY stream

-- name: ranges
-- The range of the sampled ids of each stream.
SELECT stream, min(stream_id) AS first, max(stream_id) AS last
FROM sampled GROUP BY stream

-- name: add_texts
INSERT INTO texts SELECT stream, stream_id, row_index, "row", ?
FROM found SEMI JOIN sampled USING (stream, stream_id)

-- name: repeated
SELECT count(*) FROM ids WHERE repeated

-- name: add_repeated
INSERT INTO archived SELECT found.* FROM found
SEMI JOIN (FROM ids WHERE repeated) USING (stream, stream_id)

-- name: add_purged
INSERT INTO purged VALUES (?, ?, ?)
