"""The listeners of a stand-alone process, for HTTP and for direct TCP."""

from __future__ import annotations

import errno

import attrs
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IProtocolFactory
from twisted.protocols.tls import TLSMemoryBIOFactory

from synapse_replication.app.stop_steps import StopSteps
from synapse_replication.config.endpoints import listener_descriptions, server_endpoint
from synapse_replication.config.listener_safety import Listener
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.transport.reactor import IReactor


@attrs.define(eq=False, repr=False)
class Listening:
    """Opens ports, and closes them when the process stops."""

    _reactor: IReactor
    _options: ReplicationOptions
    _stops: StopSteps

    async def open(self, listener: Listener, factory: IProtocolFactory) -> None:
        """Listen at all addresses of a listener.

        :raises ConfigError: if one of them cannot be used.
        """
        if listener.tls:
            context = self._options.tls.for_listening()
            factory = TLSMemoryBIOFactory(context, False, factory)
        for description in listener_descriptions(listener):
            await self.listen(description, factory)

    async def listen(self, description: str, factory: IProtocolFactory) -> None:
        """Listen at an endpoint.

        :param description: the endpoint in Twisted's syntax.
        :raises ConfigError: if it cannot be used.
        """
        endpoint = server_endpoint(self._reactor, description, self._options)
        try:
            port = await endpoint.listen(factory)
        except CannotListenError as error:
            is_tcp = description in self._options.tcp_listen
            raise self._options.error(
                "tcp_listen" if is_tcp else "listeners",
                f"cannot listen on {description}: {error.socketError}",
                _hint(description, error),
            ) from error
        self._stops.add(f"closing {description}", port.stopListening)


def _hint(description: str, error: CannotListenError) -> str:
    """Return what the operator can do if an endpoint cannot be used."""
    if getattr(error.socketError, "errno", 0) == errno.EMFILE:
        return "raise the limit of open files (ulimit -n, or LimitNOFILE=)"
    if description.startswith("unix:"):
        return "remove the file, or stop the process that listens on it"
    return "choose a free port, and an address of this machine"
