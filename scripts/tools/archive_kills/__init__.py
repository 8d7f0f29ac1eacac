"""Kills the archive's driver at many points, and checks that each row is stored once.

::

    python -m scripts.tools.archive_kills --kills 40 --seed 1
    python -m scripts.tools.archive_kills --two-drivers 8 --seed 1

New rows are written to a private PostgreSQL before each run. A run is a separate
process, with Spark. It is killed with SIGKILL, first at each named point, then at
random times: only its Python process, only its Java process, or both. The next run
starts immediately, while the Java process of the previous run may still be running.
After each kill, the Delta tables are searched for rows that are duplicated, or that are
not in the database. The last run is not killed; then Spark, DuckDB, pyarrow and the
database must agree on every row.

With ``--two-drivers``, two runs archive to the same location concurrently, in several
rounds, and one of them is sometimes killed. A run whose commit conflicts with a commit
of the other run must end with an error that names the conflict.
"""
