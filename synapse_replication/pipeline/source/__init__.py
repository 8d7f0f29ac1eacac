"""The Spark data source of the replicated streams."""
