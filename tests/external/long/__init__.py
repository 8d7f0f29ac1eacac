"""Tests that need only what the others need, but take minutes. ``tox -e long``."""
