"""The definitions of all metrics, which are the rows of ``metrics.csv``.

The first group has the names that a homeserver's existing dashboards and alerts use;
the second group has further metrics. Every metric has the label ``server_name``, which
distinguishes several servers in one process. Counters are exposed with the suffix
``_total``, as Prometheus requires.
"""

from __future__ import annotations

import enum
from pathlib import Path

from msgspec import Struct

from synapse_replication.data_files import read_table

#: The last label of every metric.
SERVER_NAME_LABEL = "server_name"


class MetricKind(enum.Enum):
    """The type of a metric, by its Prometheus name."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricDefinition(Struct, frozen=True):
    """One metric.

    :ivar name: the name, without the suffix that Prometheus adds to counters.
    :ivar labels: the labels, without ``server_name``, which every metric has.
    :ivar documentation: the help text: one sentence, with the unit.
    :ivar is_read_at_scrape: whether its values are read at each scrape, and not stored.
    :ivar event: the class of the events that it counts, whose attributes are its
        labels; empty if methods of the observer set its values.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    documentation: str
    is_read_at_scrape: bool
    event: str


METRICS = tuple(
    MetricDefinition(
        row["Name"],
        MetricKind(row["Kind"]),
        tuple(row["Labels"].split()),
        row["Meaning"],
        row["At scrape"] == "yes",
        row["Event"],
    )
    for row in read_table(Path(__file__).with_suffix(".csv"))
)
