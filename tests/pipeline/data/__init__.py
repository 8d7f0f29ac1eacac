"""Data files for tests of the pipeline."""
