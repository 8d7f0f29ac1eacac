"""The commands of the line protocol."""
