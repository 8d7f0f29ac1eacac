"""Commands: one process announces its syncing users, another one records them."""

from typing import Any

from twisted.application.service import Service
from twisted.logger import Logger

from synapse_replication import api

log = Logger("shop")


class FrontEnd(Service):
    """A service for ``modules`` of the process that serves clients."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def startService(self) -> None:
        super().startService()
        host = self.host
        instance_id, now = host.identity.instance_id, host.clock.time_msec()
        name, send = host.identity.instance_name, host.outgoing.send
        user = "@alice:example.com"
        # Commands are retained if there is no link yet.
        send(api.UserSyncCommand(instance_id, user, "PHONE", True, now))
        send(api.UserIpCommand(user, "token", "10.0.0.7", "App/1.0", "PHONE", now))
        send(api.RemoteServerUpCommand("matrix.example.org"))
        send(api.FederationAckCommand(name, 41))
        send(api.FederationAckCommand(name, 42))
        send(api.LockReleasedCommand(name, "cleanup", "events"))


def make_front_end(host: Any, config: dict[str, Any]) -> FrontEnd:
    return FrontEnd(host)


class UserRecorder(api.SyncingUsers):
    """The ``command_sink`` of the process that records users."""

    def on_command(self, command: api.Command) -> None:
        super().on_command(command)
        if isinstance(command, api.UserSyncCommand):
            log.info("syncing users: {users}", users=len(self.syncing_users()))
        elif isinstance(command, api.UserIpCommand):
            log.info("{user} was seen at {ip}", user=command.user_id, ip=command.ip)
        elif isinstance(command, api.RemoteServerUpCommand):
            log.info("{server} is up again", server=command.data)
        elif isinstance(command, api.FederationAckCommand):
            log.info(
                "{name} has sent up to {token}",
                name=command.instance_name,
                token=command.token,
            )
        elif isinstance(command, api.LockReleasedCommand):
            log.info(
                "lock {name}/{key} is free",
                name=command.lock_name,
                key=command.lock_key,
            )


def make_recorder(host: Any, config: dict[str, Any]) -> UserRecorder:
    # By default, only the instance that stores addresses subscribes to them.
    host.outgoing.subscribe_to_channel("USER_IP")
    return UserRecorder(own=host.outgoing.syncing_users)
