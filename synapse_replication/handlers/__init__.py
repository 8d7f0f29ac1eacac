"""Handlers of commands and rows. All collaborators are passed to their constructors."""
