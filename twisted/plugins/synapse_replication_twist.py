"""The ``twist`` (and ``twistd``) plugin."""

from twisted.application.service import ServiceMaker

synapse_replication = ServiceMaker(
    "synapse-replication",
    "synapse_replication.app.twist",
    "Replicate streams of rows between the processes of a homeserver.",
    "synapse-replication",
)
