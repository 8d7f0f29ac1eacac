"""Print the orders that arrive."""

from typing import Any


class PrintingSink:
    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        for row in rows:
            print(stream_name, instance_name, token, row.order_id, row.note)

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        print(stream_name, instance_name, "has nothing more up to", token)


def make_sink(host: Any, config: dict[str, Any]) -> PrintingSink:
    return PrintingSink()
