"""Jobs: read, transform, write. Only they know paths and sessions."""
