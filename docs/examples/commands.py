"""Commands: one process announces its syncing users, another one records them."""

from typing import Any

from twisted.application.service import Service
from twisted.logger import Logger

from synapse_replication.api import SyncingUsers

log = Logger("shop")


class FrontEnd(Service):
    """A service for ``modules`` of the process that serves clients."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def startService(self) -> None:
        super().startService()
        # Commands are retained if there is no link yet.
        send = self.host.send
        send.send_user_sync("@alice:example.com", "PHONE", is_syncing=True)
        send.send_user_ip("@alice:example.com", "token", "10.0.0.7", "App/1.0", "PHONE")
        send.send_remote_server_up("matrix.example.org")
        send.send_federation_ack(41)
        send.send_federation_ack(42)
        send.send_lock_released("cleanup", "events")


def make_front_end(host: Any, config: dict[str, Any]) -> FrontEnd:
    return FrontEnd(host)


class UserRecorder(SyncingUsers):
    """The ``command_sink`` of the process that records users."""

    def on_user_sync(
        self,
        instance_id: str,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        last_sync_ms: int,
    ) -> None:
        super().on_user_sync(instance_id, user_id, device_id, is_syncing, last_sync_ms)
        log.info("syncing users: {users}", users=len(self.syncing_users()))

    def on_user_ip(
        self,
        user_id: str,
        access_token: str,
        ip: str,
        user_agent: str,
        device_id: str | None,
        last_seen_ms: int,
    ) -> None:
        log.info("{user_id} was seen at {ip}", user_id=user_id, ip=ip)

    def on_remote_server_up(self, server: str) -> None:
        log.info("{server} is up again", server=server)

    def on_federation_ack(self, instance_name: str | None, token: int) -> None:
        log.info("{name} has sent up to {token}", name=instance_name, token=token)

    def on_lock_released(
        self, instance_name: str, lock_name: str, lock_key: str
    ) -> None:
        log.info("lock {name}/{key} is free", name=lock_name, key=lock_key)


def make_recorder(host: Any, config: dict[str, Any]) -> UserRecorder:
    # By default, only the instance that stores addresses subscribes to them.
    host.send.subscribe_to_channel("USER_IP")
    return UserRecorder(own=host.send.syncing_users)
