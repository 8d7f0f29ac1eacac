"""Benchmarks: the same work with this package and with a real Synapse, alternately."""
