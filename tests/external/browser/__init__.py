"""Tests for the pages in a real browser. ``tox -e browser``."""
