"""The extension inside a host: epochs and heartbeats.

Theory of operation: a homeserver whose command handler is replaced has one
:class:`ReplicationExtension`, unless it is disabled. The extension is created with the
command handler. If the Redis subscription is replaced, too, it uses the extension. The
extension's epoch is the host's instance id: a random id that differs at each start.
Stock processes do not subscribe to the extension's channel.

If peers can request sent rows, the extension retains them in a backlog: see
``backlogs.py``.
"""

from __future__ import annotations

import os
from typing import Any

from synapse_replication.dropin.observer import observer_of
from synapse_replication.dropin.settings import DropInSettings
from synapse_replication.dropin.synapse_host import SynapseHost
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.streams.backlog import Backlog
from synapse_replication.text import process_label


def make_extension(
    hs: Any,
    host: SynapseHost,
    handler: ReplicationCommandHandler,
    epochs: PeerEpochs,
    backlog: Backlog | None,
) -> ReplicationExtension | None:
    """Return the extension of a homeserver; ``None`` if it is disabled.

    :param epochs: where the extension records the epochs of peers.
    :param backlog: the backlog of sent rows; ``None`` if peers cannot request them.
    """
    if not DropInSettings.from_environ(os.environ).extension:
        return None
    return ReplicationExtension(
        host, handler, observer_of(hs), epochs, backlog, where=process_label()
    )


def extension_of(handler: Any) -> ReplicationExtension | None:
    """Return the extension of a command handler; ``None`` if it has no extension."""
    extension = getattr(handler, "extension", None)
    return extension if isinstance(extension, ReplicationExtension) else None
