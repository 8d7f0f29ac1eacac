"""The extension, the optional protocol between instances that run this package."""
