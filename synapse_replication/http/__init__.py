"""Catch-up over HTTP from the process that wrote."""
