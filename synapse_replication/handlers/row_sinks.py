"""Additional interfaces of row sinks, of which a sink may implement any.

See :class:`~synapse_replication.handlers.interfaces.RowSink`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class EpochSink(Protocol):
    """Additional interface of a row sink that persists positions.

    When a writer restarts, the rows that it held in memory are lost and its tokens
    start from the beginning, so saved tokens of a stream held in memory become
    meaningless. A sink that saves these tokens therefore also saves the writer's
    *epoch* to which they belong. If the writer's current epoch differs from the saved
    epoch, or no epoch was saved, all rows are fetched from the writer again. Only the
    epochs of writers that speak the extension are known.
    """

    def saved_epochs(self) -> Mapping[tuple[str, str], str]:
        """Return the epoch of each ``(stream, writer)``. Called at startup."""
        ...

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str
    ) -> Awaitable[None] | None:
        """Record that the following rows belong to this epoch and start after token 0.

        Save the epoch and the position 0 atomically. This method is called rarely, only
        for streams that are held in memory, and in order with the rows. If it fails,
        the failure is reported and the call is repeated later.
        """
        ...


@runtime_checkable
class LateRowSink(Protocol):
    """Additional interface of a row sink that accepts rows which are late.

    A writer without this package may commit a row and never announce it. If such a row
    is found below rows that were delivered, it is passed to this method. A sink without
    it never receives the row; the observer is notified in any case.
    """

    def on_late_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        """Handle rows whose token is below the writer's position."""
        ...
