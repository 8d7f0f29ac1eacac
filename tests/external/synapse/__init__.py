"""Tests against a real Synapse. ``tox -e synapse``.

They need matrix-synapse installed next to the package, and take minutes.
"""
