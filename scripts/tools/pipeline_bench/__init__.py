"""Measures the pipeline with five million rows: reading, and the complete jobs."""
