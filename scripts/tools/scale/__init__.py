"""Measures deployments of many processes."""
