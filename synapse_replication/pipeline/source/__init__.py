"""The Spark data source over the replicated streams."""
