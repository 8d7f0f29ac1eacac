"""The send path: from a stream's new rows to commands."""
