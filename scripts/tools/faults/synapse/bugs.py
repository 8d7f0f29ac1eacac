"""Deliberate bugs that the checker must find; loaded in processes under test."""

from __future__ import annotations

from synapse_replication.dropin.streams import HostStream

__all__ = ["trust_persisted_upto"]


def trust_persisted_upto() -> None:
    """Use the host's value for a writer's delivered position.

    A host that does not know a writer's position returns how far all writers
    together have persisted their rows. Announcements of *other* writers move that
    past a row that was never delivered.
    """

    def current_token(self: HostStream, instance_name: str) -> int:
        return int(self.original.current_token(instance_name))

    def writers_behind(self: HostStream, instance_name: str, token: int) -> list[str]:
        return []

    HostStream.current_token = current_token  # type: ignore[method-assign]
    # And fetch no rows before such an announcement is delivered.
    HostStream.writers_behind = writers_behind  # type: ignore[method-assign]
