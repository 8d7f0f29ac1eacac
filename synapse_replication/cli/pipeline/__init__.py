"""``synapse-replication pipeline``: one module a command."""
