"""Tests with many versions of what the package is used with: ``scripts/matrix``."""
