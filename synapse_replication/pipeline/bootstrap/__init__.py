"""The job that computes a deployment's lost positions from its tables."""
