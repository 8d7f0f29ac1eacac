"""A service on asyncio: one process writes prices, another one stores them.

It needs Redis on this machine. Run ``python asyncio_shop.py writer`` and ``python
asyncio_shop.py reader`` in two terminals.
"""

import asyncio
import sys
from typing import Any

import attrs
from twisted.internet import asyncioreactor

# Before anything imports the reactor. It creates the event loop.
asyncioreactor.install()

from twisted.internet import reactor  # noqa: E402, TID251

from synapse_replication import api  # noqa: E402


@attrs.frozen
class PriceRow:
    item: str
    price: int


PRICES = api.InMemory(
    name="prices", row_type=PriceRow, writers="writer", key=lambda row: row.item
)


class StoringSink:
    async def on_rdata(
        self, stream: str, writer: str, token: int, rows: list[Any]
    ) -> None:
        await asyncio.wait_for(self._store(rows), timeout=5)
        print("stored", token, *rows, flush=True)

    async def _store(self, rows: list[Any]) -> None:
        await asyncio.sleep(0.01)  # a request to another system

    def on_position(self, stream: str, writer: str, token: int) -> None:
        """Ignore a position without rows."""


async def write_prices(replication: api.Replication) -> None:
    # A task of your own awaits a Deferred as a future.
    await replication.started.asFuture(asyncio.get_running_loop())
    for price in range(1, 1_000_000):
        replication[PRICES].write([PriceRow("tea", price)])
        await asyncio.sleep(0.5)


def make_service(name: str) -> api.Replication:
    options = api.ReplicationOptions(
        server_name="shop.example.com",
        instance_name=name,
        streams=[PRICES],
        redis=api.RedisOptions(host="localhost", port=6379),
        instances={"writer": api.InstanceLocation("127.0.0.1", 9094)},
    )
    replication = api.Replication(reactor, options, StoringSink())
    if name == "writer":
        writing = asyncio.ensure_future(write_prices(replication))
        reactor.addSystemEventTrigger("before", "shutdown", writing.cancel)
    return replication


if __name__ == "__main__":
    api.start_logging(sys.stderr)
    sys.exit(api.run_service(reactor, lambda: make_service(sys.argv[1])))
