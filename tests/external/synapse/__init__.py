"""Tests against a real Synapse. ``tox -e synapse``.

They need matrix-synapse installed beside the package, and minutes, not seconds.
"""
