"""An id that has been unfinished for some time: :class:`StuckId`."""

from __future__ import annotations

import attrs


@attrs.frozen
class StuckId:
    """An id that delays the persisted-up-to position of all writers of its stream.

    :ivar stream_name: the stream's name on the wire.
    :ivar id: the id as in the tables. If another process allocated it, the first id
        that is not known to be finished; the unfinished id may be farther from zero.
    :ivar instance_name: its writer.
    :ivar age: for how long this process has seen it unfinished, in s.
    :ivar session: the database session that holds it, for display; empty until the
        database has been queried.
    :ivar hint: the advice to the operator.
    """

    stream_name: str
    id: int
    instance_name: str
    age: float
    session: str = ""
    hint: str = ""
