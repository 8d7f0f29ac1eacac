"""Extracts the tables of streams from a Synapse database, as SQL for tests.

``real_streams.sql.gz`` was made from a dump of the deployment whose start is in the
package's recording. The dump was restored into an empty database; then this was run::

    python -m tests.pipeline.data.cut_streams "dbname=..." real_streams.sql.gz

The columns are those of ``tests.storage.synapse_extract``. The rows are those with ids
up to slightly beyond the end of the recording. Ids of events and rooms are truncated to
twelve characters, which are still unique and need a quarter of the space. The users are
fictitious.
"""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path

import psycopg2

from tests.storage.synapse_extract import SCHEMA

#: Columns whose values are truncated.
_LONG_IDS = ("event_id", "room_id", "redacts", "relates_to_id")
_LENGTH = 12
#: Columns that contain JSON, which is written as text.
_JSON = ("affected_fields",)

_OF_EVENTS = "event_id IN (SELECT event_id FROM events WHERE stream_ordering <= 4050)"
#: The condition on the rows of a table, if it differs from the default.
_CONDITIONS = {
    "events": "stream_ordering <= 4050",
    "ex_outlier_stream": "event_stream_ordering <= 4050",
    "current_state_delta_stream": "stream_id <= 4050",
    "stream_positions": "TRUE",
    "pushers": "TRUE",
    "cache_invalidation_stream_by_instance": "stream_id <= 1500",
}
_ABOUT_EVENTS = (
    "state_events",
    "redactions",
    "event_relations",
    "room_memberships",
    "rejections",
)


def _value(column: str) -> str:
    if column in _LONG_IDS:
        return f"left({column}, {_LENGTH})"
    return f"{column}::text" if column in _JSON else column


def main(dsn: str, path: str) -> None:
    """Write the extract to the file that the command line names."""
    statements = []
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        tables = re.findall(r"CREATE TABLE (\w+) \((.*?)\);", SCHEMA, re.DOTALL)
        for table, body in (
            *tables,
            ("stream_positions", "stream_name t, instance_name t, stream_id t"),
        ):
            columns = re.findall(r"(?:^|,)\s*([a-z_]+) ", body)
            values = ", ".join(map(_value, columns))
            if table in _ABOUT_EVENTS:
                condition = _OF_EVENTS
            else:
                condition = _CONDITIONS.get(table, "stream_id <= 700")
            cursor.execute(f"SELECT {values} FROM {table} WHERE {condition} ORDER BY 1")
            placeholders = f"({', '.join(['%s'] * len(columns))})"
            rows = [
                cursor.mogrify(placeholders, row).decode() for row in cursor.fetchall()
            ]
            if rows:
                statements.append(
                    f"INSERT INTO {table} ({', '.join(columns)}) VALUES\n"
                    + ",\n".join(rows)
                    + ";\n"
                )
        cursor.execute("SELECT sequencename, last_value FROM pg_sequences ORDER BY 1")
        for name, last in cursor.fetchall():
            if re.search(r"stream|receipts|inbox|account_data|device_lists", name) or (
                re.match(r"pushers|thread|sticky|profile|quarantined", name)
            ):
                statements.append(
                    f"CREATE SEQUENCE {name};\nSELECT setval('{name}', "
                    f"{last or 1}, {'true' if last else 'false'});\n"
                )
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write("".join(statements).encode())
    sys.stdout.write(f"{Path(path).stat().st_size} bytes\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
