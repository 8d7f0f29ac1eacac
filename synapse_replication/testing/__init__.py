"""Doubles and private servers for the tests of this package and of its hosts."""
