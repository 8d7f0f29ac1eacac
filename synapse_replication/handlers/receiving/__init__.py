"""The receive path: queues, catch-up and delivery, per stream."""
