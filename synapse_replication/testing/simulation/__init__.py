"""A cluster in one process: real code, simulated time, network, Redis, Postgres.

Everything that happens follows from one seed. See ``scripts/simulate --help``.
"""
