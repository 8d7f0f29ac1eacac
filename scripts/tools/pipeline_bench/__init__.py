"""Measures the pipeline at five million rows: reading, and the jobs as they are run."""
