"""The receive path of each stream: queue, catch-up and delivery."""
