"""Handlers of commands and rows; every collaborator is passed as an argument."""
