"""Batch and streaming jobs on Spark over the replicated streams."""
