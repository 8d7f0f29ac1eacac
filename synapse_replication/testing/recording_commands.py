"""A command sink that records the commands that it receives, for tests to inspect."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any

from synapse_replication.handlers.interfaces import SyncingUser


class RecordingCommands:
    """A command sink whose ``on_...`` methods only record that they were called.

    :ivar calls: for each call, in order, ``(method, *arguments)``.
    :ivar answer: the return value of every ``on_...`` method.
    :ivar error: the exception that every ``on_...`` method raises, if set.
    :ivar syncing: the users who sync with this process.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer: Awaitable[None] | None = None
        self.error: Exception | None = None
        self.syncing: list[SyncingUser] = []

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users to report on a new link."""
        return self.syncing

    def on_user_sync(
        self,
        instance_id: str,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        last_sync_ms: int,
    ) -> Awaitable[None] | None:
        """Record that a user started, continued or stopped syncing."""
        return self._call(
            "on_user_sync", instance_id, user_id, device_id, is_syncing, last_sync_ms
        )

    def on_clear_user_sync(self, instance_id: str) -> Awaitable[None] | None:
        """Record that no user syncs with an instance any more."""
        return self._call("on_clear_user_sync", instance_id)

    def on_federation_ack(
        self, instance_name: str | None, token: int
    ) -> Awaitable[None] | None:
        """Record the token up to which a federation sender has sent."""
        return self._call("on_federation_ack", instance_name, token)

    def on_user_ip(
        self,
        user_id: str,
        access_token: str,
        ip: str,
        user_agent: str,
        device_id: str | None,
        last_seen_ms: int,
    ) -> Awaitable[None] | None:
        """Record the address from which a user was last seen.

        :param last_seen_ms: in ms since 1970.
        """
        return self._call(
            "on_user_ip", user_id, access_token, ip, user_agent, device_id, last_seen_ms
        )

    def on_remote_server_up(self, server: str) -> Awaitable[None] | None:
        """Record that a remote server is reachable again."""
        return self._call("on_remote_server_up", server)

    def on_lock_released(
        self, instance_name: str, lock_name: str, lock_key: str
    ) -> Awaitable[None] | None:
        """Record that a lock was released."""
        return self._call("on_lock_released", instance_name, lock_name, lock_key)

    def on_new_active_task(self, task_id: str) -> Awaitable[None] | None:
        """Record a request to launch a scheduled task."""
        return self._call("on_new_active_task", task_id)

    def on_cancel_task(self, task_id: str) -> Awaitable[None] | None:
        """Record a request to cancel a scheduled task."""
        return self._call("on_cancel_task", task_id)

    def on_remove_pusher(
        self, app_id: str, push_key: str, user_id: str
    ) -> Awaitable[None] | None:
        """Record a request to delete a pusher of a user."""
        return self._call("on_remove_pusher", app_id, push_key, user_id)

    def on_invalidate_cache(
        self, cache_func: str, keys: list[Any] | None
    ) -> Awaitable[None] | None:
        """Record a request to invalidate one entry, or all entries, of a cache.

        :param keys: the key of the entry; ``None`` for all entries.
        """
        return self._call("on_invalidate_cache", cache_func, keys)

    def _call(self, *call: Any) -> Awaitable[None] | None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return self.answer
