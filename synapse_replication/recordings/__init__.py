"""Recorded traffic: the format, files, replay, and one recording as data."""
