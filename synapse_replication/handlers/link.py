"""A link: one connection, from its establishment to its loss."""

from __future__ import annotations

import attrs

from synapse_replication.handlers.interfaces import ReplicationConnection


@attrs.frozen(eq=False)
class Link:
    """A connection, from ``new_connection`` to ``lost_connection``.

    A connection that is established again is another link.
    """

    connection: ReplicationConnection
