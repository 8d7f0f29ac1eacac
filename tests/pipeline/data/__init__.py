"""Data that tests of the pipeline read."""
