"""The wire format: lines and messages to and from values. Pure, without I/O."""
