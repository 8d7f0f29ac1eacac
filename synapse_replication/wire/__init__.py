"""What goes over the wire, to and from values: pure, without I/O."""
