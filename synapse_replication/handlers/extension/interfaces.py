"""The interfaces between the extension and the links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from synapse_replication.handlers.interfaces import ReplicationConnection


class ExtensionConnection(ReplicationConnection, Protocol):
    """A link on which extension messages can be sent.

    :ivar is_direct: whether the link is a direct TCP connection to one peer.
    :ivar has_own_channel: whether messages for this instance alone arrive on the link.
    """

    is_direct: bool
    has_own_channel: bool

    def send_extension(self, payloads: Sequence[bytes], to: str = "") -> None:
        """Send messages, in order with the rows and commands on the link.

        :param to: the only instance that receives them; empty for all. A direct link
            has only one peer.

        The messages are dropped if the link currently cannot send. Never raises.
        """
        ...


class ExtensionHandler(Protocol):
    """The part of :class:`ReplicationExtension` that links use.

    :ivar instance_name: the name of this instance.
    """

    instance_name: str

    def extension_up(self, connection: ExtensionConnection) -> None:
        """Add a link on which messages can be sent and received."""
        ...

    def extension_down(self, connection: ExtensionConnection) -> None:
        """Remove a link."""
        ...

    def sending_resumed(self) -> None:
        """Publish a hello again: earlier messages may not have arrived.

        Never raises. Only links over Redis call it.
        """
        ...

    def extension_received(
        self, connection: ExtensionConnection, payload: bytes
    ) -> None:
        """Handle one message, in order with the items of the command handler."""
        ...
