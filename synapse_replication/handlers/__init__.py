"""Handling of commands and rows; every collaborator is an argument."""
