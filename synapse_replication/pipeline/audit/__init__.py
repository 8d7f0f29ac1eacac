"""The audit: checks of what the wire, the tables and the archive say."""
