"""Exploration of the reader's state machine in every interleaving of a small world."""
