"""The pages in a real browser. ``tox -e browser``."""
