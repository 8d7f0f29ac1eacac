"""Tests of the pipeline; all share one Spark session."""
