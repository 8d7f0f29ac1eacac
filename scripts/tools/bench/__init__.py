"""The same work through this package and through a real Synapse, in turn."""
