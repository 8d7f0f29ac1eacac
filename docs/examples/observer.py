"""Update metrics, write log lines, and print discarded rows."""

from prometheus_client import CollectorRegistry
from twisted.logger import Logger

from synapse_replication.handlers.events import Discarded
from synapse_replication.handlers.observer import (
    CompositeObserver,
    ReplicationObserver,
    handles,
)
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.instrumentation.status.status_observer import StatusObserver


class DiscardPrinter(ReplicationObserver):
    @handles(Discarded)
    def print_discard(self, event: Discarded) -> None:
        print(f"{event.count} of {event.stream_name}: {event.reason.value}")


def make_observer(
    registry: CollectorRegistry, server_name: str, instance_name: str
) -> ReplicationObserver:
    status = StatusObserver(server_name, instance_name)
    return CompositeObserver(
        [
            status,
            PrometheusObserver(
                ReplicationMetrics(registry), server_name, status=status
            ),
            LoggingObserver(Logger("replication")),
            DiscardPrinter(),
        ]
    )
