"""The demonstration: real rows between real processes, with faults, and a check.

``scripts/demo`` runs it; so does ``python -m synapse_replication.testing.demo``.
"""
