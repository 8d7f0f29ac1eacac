"""Metrics, traces and logs: observers of the rest."""
