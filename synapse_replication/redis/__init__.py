"""The same commands over Redis pub/sub."""
