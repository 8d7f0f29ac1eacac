"""``synapse-replication pipeline``: one module per command."""
