"""Tests on a real Spark cluster: a master and two workers. ``tox -e spark``."""
