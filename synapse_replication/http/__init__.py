"""Catch-up over HTTP from the writer of the rows."""
