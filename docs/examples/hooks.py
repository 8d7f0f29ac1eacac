"""Log when a writer is stalled, and when it is live again."""

from typing import Any

from twisted.logger import Logger

from synapse_replication.instrumentation.hooks import CaughtUp, Stalled

log = Logger("shop")


def on_stalled(event: Stalled) -> None:
    log.warn("{event.stream_name} is stalled: {event.detail}", event=event)


def on_caught_up(event: CaughtUp) -> None:
    log.info("{event.stream_name} is live", event=event)


def subscribe(host: Any, config: dict[str, Any]) -> None:
    host.hooks.subscribe(Stalled, on_stalled)
    host.hooks.subscribe(CaughtUp, on_caught_up)
