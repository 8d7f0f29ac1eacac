"""Push each order to users exactly once and in order."""

from collections.abc import Callable
from typing import Any

from twisted.application.service import Service

from synapse_replication.api import MultiWriterStreamToken, PositionedRow


class Pusher(Service):
    """A service for ``modules`` that pushes complete ranges of orders.

    Do not push a row when it arrives: with two writers, order 6 of the fast one may
    arrive before order 5 of the slow one is even committed. If 6 were pushed
    immediately and stored as the last id, order 5 would never be pushed. This pusher
    therefore waits until the rows of *every* writer have arrived, and stores the last
    id that it has pushed.
    """

    def __init__(self, host: Any, push: Callable[[PositionedRow], None]) -> None:
        self.host = host
        self.push = push
        self.orders = host.streams.get_streams()["orders"]
        # Save this to resume after a restart.
        self.last = self.orders.current_stream_token().stream
        self.maximum = self.last
        self.is_running = False

    def startService(self) -> None:
        super().startService()
        self.unsubscribe = self.host.rows.call_when_persisted(
            "orders", self.on_persisted
        )

    def stopService(self) -> None:
        self.unsubscribe()
        super().stopService()

    def on_persisted(self, token: int) -> None:
        self.maximum = max(self.maximum, token)
        if not self.is_running:
            self.is_running = True
            self.host.run_as_background_process("push-orders", self.run)

    async def run(self) -> None:
        try:
            while self.last < self.maximum:
                page = await self.orders.get_rows_between(
                    MultiWriterStreamToken(self.last),
                    MultiWriterStreamToken(self.maximum),
                )
                for each in page.rows:
                    self.push(each)
                self.last = page.upto.stream
        finally:
            self.is_running = False


def make_pusher(host: Any, config: dict[str, Any]) -> Pusher:
    return Pusher(host, lambda each: print(each.position.stream, each.row.order_id))
