"""The wire format: parses and encodes lines and messages, without any I/O."""
