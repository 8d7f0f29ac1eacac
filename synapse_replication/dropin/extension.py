"""The extension in a host's processes: epochs and heartbeats among those on ours.

Theory of operation: a homeserver has one :class:`ReplicationExtension`, made with our
command handler and used by our subscription, if both are ours. Its epoch is the host's
instance id, which is random and made anew at each start. Stock processes never see the
channel.

What it tells of as sent is kept in a backlog, if others can ask for that: see
``backlogs.py``.
"""

from __future__ import annotations

import os
from typing import Any

from synapse_replication.app.host import process_label
from synapse_replication.dropin.adapter import SynapseHost
from synapse_replication.dropin.observer import observer_of
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.streams.backlog import Backlog

__all__ = ["ENVIRONMENT", "extension_of", "is_turned_on", "make_extension"]

#: The variable that says whether the extension is spoken: ``true`` or ``false``.
ENVIRONMENT = "SYNAPSE_REPLICATION_EXTENSION"


def is_turned_on() -> bool:
    """Return whether the extension is spoken in this process."""
    return os.environ.get(ENVIRONMENT, "true") != "false"


def make_extension(
    hs: Any,
    host: SynapseHost,
    handler: ReplicationCommandHandler,
    epochs: PeerEpochs,
    backlog: Backlog | None,
) -> ReplicationExtension | None:
    """Make the extension of a homeserver, unless it was turned off.

    :param epochs: of the other processes; to be filled by it.
    :param backlog: keeps what is sent; ``None`` if nobody can ask for it.
    """
    if not is_turned_on():
        return None
    return ReplicationExtension(
        host, handler, observer_of(hs), epochs, backlog, where=process_label()
    )


def extension_of(handler: Any) -> ReplicationExtension | None:
    """Return the extension of a command handler, which may be a stock one."""
    extension = getattr(handler, "extension", None)
    return extension if isinstance(extension, ReplicationExtension) else None
