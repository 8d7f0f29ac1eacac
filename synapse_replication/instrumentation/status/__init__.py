"""The replication status of a process, and the observer that tracks it."""
