"""Replacements for ``synapse.replication.tcp.resource``."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import ServerFactory
from typing_extensions import override

from synapse_replication.dropin.host_code import host_attribute
from synapse_replication.dropin.host_streams import declared_writers, ids_are_ours
from synapse_replication.dropin.observer import observer_of
from synapse_replication.handlers.sending import streamer

#: The interval at which idle streams are checked, in s, if the streamer is notified of
#: each change of its positions: after writes of this process, and, if this package
#: supplies the ids, when it learns of those of others. A check takes 0.4 ms.
NOTIFIED_INTERVAL = 10.0


class DropInProtocolFactory(ServerFactory):
    """Creates the server's end of each direct TCP connection."""

    noisy = False

    def __init__(self, hs: Any) -> None:
        self._hs = hs
        self._protocol = host_attribute("protocol", "ServerReplicationStreamProtocol")
        self._handler = hs.get_replication_command_handler()
        # Create the streamer, so that rows are sent as soon as a client connects.
        hs.get_replication_streamer()

    @override
    def buildProtocol(self, addr: IAddress | None) -> Any:
        return self._protocol(
            self._hs, self._hs.hostname, self._hs.get_clock(), self._handler
        )


class DropInStreamer(streamer.ReplicationStreamer):
    """Sends the rows that this process writes; starts in its constructor."""

    def __init__(self, hs: Any) -> None:
        handler = hs.get_replication_command_handler()
        options = streamer.StreamerOptions(
            torture_level=getattr(hs.config.server, "replication_torture_level", 0) or 0
        )
        self._written = handler.host.streams.get_streams_to_replicate()
        writers = [
            declared_writers(hs.config.worker, stream.description.name)
            for stream in self._written
        ]
        if ids_are_ours() or max(map(len, writers), default=0) <= 1:
            options = replace(options, announce_interval=NOTIFIED_INTERVAL)
        super().__init__(handler.host, handler.sender, observer_of(hs), options=options)
        self.start()

    @override
    def on_notifier_poke(self) -> None:
        """Start sending new rows. The call is cheap, and may be made at any time."""
        super().on_notifier_poke()
        if any(stream.is_limited for stream in self._written):
            # A sequence must be read, or is being read.
            self.retry_soon()
