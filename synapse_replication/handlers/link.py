"""A link: one connection, from its establishment to its loss."""

from __future__ import annotations

from msgspec import Struct

from synapse_replication.handlers.interfaces import ReplicationConnection


class Link(Struct, frozen=True, eq=False):
    """A connection, from ``new_connection`` to ``lost_connection``.

    A connection that is established again is another link.
    """

    connection: ReplicationConnection
