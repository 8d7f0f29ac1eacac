"""Streams, rows, tokens and positions: pure, without I/O."""
