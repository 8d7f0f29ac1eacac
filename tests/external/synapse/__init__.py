"""Tests against a real Synapse, run by ``tox -e synapse`` and by nothing else.

They need matrix-synapse installed beside the package, and minutes, not seconds;
so they live outside ``tests/``, which ``scripts/test`` and ``trial tests`` run.
"""
