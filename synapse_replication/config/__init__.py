"""The configuration of one process: files, models, checks."""
