"""The one place that knows Synapse's own classes."""
