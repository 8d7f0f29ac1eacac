"""Configuration, wiring and the command line."""
