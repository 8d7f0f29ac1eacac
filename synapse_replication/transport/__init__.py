"""What connections share: TLS and bounded buffers."""
