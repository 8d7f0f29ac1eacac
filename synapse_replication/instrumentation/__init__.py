"""Observers of replication: metrics, traces, logs, hooks and the status."""
