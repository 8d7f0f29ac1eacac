"""Kill an archive's driver at every point, and check that each row is there once.

::

    python -m scripts.tools.archive_kills --kills 24 --seed 1
    python -m scripts.tools.archive_kills --two-drivers 8 --seed 1

A private PostgreSQL gets new rows before each run. A run is a process of its own, with
Spark; it is killed with SIGKILL at each named point of the writing first, then at
random moments: its Python alone, its Java alone, or both. The next run starts at once,
while Java of the last one may still be alive. After each kill the Delta tables are read
and searched for rows that are doubled, or that no table of the database has. At the end
a run is left alone; then Spark's reader, DuckDB's, pyarrow's and the tables must agree
in every row.

With ``--two-drivers`` two runs archive to one place at the same time, round after
round, and one of them is killed now and then. A run that another one was ahead of must
end with a message that says so.
"""
