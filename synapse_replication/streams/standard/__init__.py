"""Declarations of the streams of a Synapse deployment."""
