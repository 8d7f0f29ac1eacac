"""Deliberate bugs that the checker must find; loaded inside a process on ours."""

from __future__ import annotations

from synapse_replication.dropin.streams import HostStream

__all__ = ["trust_persisted_upto"]


def trust_persisted_upto() -> None:
    """Take the host's word for how far a writer's rows were delivered.

    A host that does not know a writer's position returns how far all writers
    together have persisted their rows. Announcements of *other* writers move that
    past a row that was never delivered.
    """

    def current_token(self: HostStream, instance_name: str) -> int:
        return int(self.original.current_token(instance_name))

    def writers_behind(self: HostStream, instance_name: str, token: int) -> list[str]:
        return []

    HostStream.current_token = current_token  # type: ignore[method-assign]
    # Nor is anybody asked for rows before such an announcement is taken.
    HostStream.writers_behind = writers_behind  # type: ignore[method-assign]
