"""Deliberate bugs that the checker must find; processes under test load them."""

from __future__ import annotations

from synapse_replication.dropin.host_streams import HostStream


def trust_persisted_upto() -> None:
    """Use the host's value for a writer's delivered position.

    For a writer whose position the host does not know, it returns the position that all
    writers together have persisted. Announcements of *other* writers advance that
    position past a row that was never delivered.
    """

    def current_token(self: HostStream, instance_name: str) -> int:
        return int(self.original.current_token(instance_name))

    def writers_behind(self: HostStream, instance_name: str, token: int) -> list[str]:
        return []

    HostStream.current_token = current_token  # type: ignore[method-assign]
    # Also, do not fetch rows before such an announcement is delivered.
    HostStream.writers_behind = writers_behind  # type: ignore[method-assign]
