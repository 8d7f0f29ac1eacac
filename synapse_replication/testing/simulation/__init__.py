"""A cluster in one process: real code with simulated time, network, Redis, PostgreSQL.

One seed determines the whole run. See ``scripts/simulate --help``.
"""
