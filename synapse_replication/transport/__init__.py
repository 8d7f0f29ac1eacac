"""Code shared by all kinds of connections: TLS, timeouts and buffer sizes."""
