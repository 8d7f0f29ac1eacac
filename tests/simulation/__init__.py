"""A simulated cluster in one process, which runs the code of this package.

Time, the network, Redis and PostgreSQL are simulated. A seed determines the whole run.
See ``scripts/simulate --help``.
"""
