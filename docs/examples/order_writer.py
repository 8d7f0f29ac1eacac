"""Write two orders at each interval."""

from typing import Any

from twisted.application.internet import TimerService


def make_writer(host: Any, config: dict[str, Any]) -> TimerService:
    orders = host.streams.get_streams()["orders"]
    new_order = orders.description.codec.row_type

    async def write() -> None:
        # All rows of one call share one token: they arrive together.
        await orders.write(
            [
                new_order(order_id="o1", note="first"),
                new_order(order_id="o2", note=None),
            ]
        )

    def start() -> Any:
        return host.run_as_background_process("write-orders", write)

    return TimerService(config.get("interval", 1.0), start)
