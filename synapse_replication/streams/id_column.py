"""The columns of a database that store the ids of a stream."""

from __future__ import annotations

import attrs


@attrs.frozen
class IdColumn:
    """A column that stores ids of a stream.

    :ivar table: the table, optionally qualified by its schema.
    :ivar id_column: the column with the ids.
    :ivar writer_column: the column with the name of the instance that wrote the row;
        ``None`` if the table has none.
    """

    table: str
    id_column: str
    writer_column: str | None
