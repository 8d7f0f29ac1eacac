"""The extension in a host's processes: epochs and heartbeats among those on ours.

Theory of operation: a homeserver has one :class:`ReplicationExtension`, made with our
command handler and used by our subscription, if both are ours. Its epoch is the host's
instance id, which is random and made anew at each start. Stock processes never see the
channel.

It keeps no backlog: a host's HTTP listener has no place where ours could be asked for
one, so catch-up goes to the database, as the host's own.
"""

from __future__ import annotations

import os
from typing import Any

from synapse_replication.app.place import this_place
from synapse_replication.dropin.adapter import SynapseHost
from synapse_replication.dropin.observer import observer_of
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension import ReplicationExtension
from synapse_replication.handlers.handler import ReplicationCommandHandler

__all__ = ["ENVIRONMENT", "extension_of", "make_extension"]

#: The variable that says whether the extension is spoken: ``true`` or ``false``.
ENVIRONMENT = "SYNAPSE_REPLICATION_EXTENSION"


def make_extension(
    hs: Any, host: SynapseHost, handler: ReplicationCommandHandler
) -> ReplicationExtension | None:
    """Make the extension of a homeserver, unless it was turned off."""
    if os.environ.get(ENVIRONMENT, "true") == "false":
        return None
    return ReplicationExtension(
        host, handler, observer_of(hs), PeerEpochs(), None, where=this_place()
    )


def extension_of(handler: Any) -> ReplicationExtension | None:
    """Give the extension of a command handler, which may be a stock one."""
    extension = getattr(handler, "extension", None)
    return extension if isinstance(extension, ReplicationExtension) else None
