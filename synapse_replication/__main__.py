"""Runs ``synapse-replication`` for ``python -m synapse_replication``."""

from __future__ import annotations

from synapse_replication.cli.main import main

if __name__ == "__main__":
    main()
