"""The optional protocol between two instances that run this package."""
