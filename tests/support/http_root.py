"""The root resource that serves only the rows of a process, for tests."""

from __future__ import annotations

from twisted.web.resource import Resource

from synapse_replication.http.resource import ReplicationResource


def under_root(replication: ReplicationResource) -> Resource:
    """Return a root resource that serves a resource at its path."""
    root, synapse = Resource(), Resource()
    root.putChild(b"_synapse", synapse)
    synapse.putChild(b"replication", replication)
    return root
