"""The send path: turns a stream's new rows into commands."""
