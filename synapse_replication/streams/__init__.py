"""Streams, rows, tokens and positions: pure logic without I/O."""
