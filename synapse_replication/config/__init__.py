"""The configuration of a process and of its deployment: files, models, checks."""
