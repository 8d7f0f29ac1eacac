"""The replication protocol over Redis pub/sub."""
