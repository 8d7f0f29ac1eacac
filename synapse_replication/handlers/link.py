"""A link: one connection, from its establishment to its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from synapse_replication.handlers.interfaces import ReplicationConnection


class Link(Struct, frozen=True, eq=False):
    """A connection, from ``new_connection`` to ``lost_connection``.

    A connection that is established again is another link.
    """

    connection: ReplicationConnection
