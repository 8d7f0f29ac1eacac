"""The command line of the matrix."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from scripts.tools.matrix.rows import all_rows
from scripts.tools.matrix.run import (
    TABLE,
    MatrixError,
    create_environment,
    run_row,
    update_table,
)
from synapse_replication.testing.server_binaries import (
    installed_postgres,
    installed_redis,
)

_PATHS = click.Path(exists=True, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--fast", is_flag=True, help="Run only a part with each Synapse.")
@click.option(
    "--redis",
    "redis",
    type=_PATHS,
    multiple=True,
    metavar="FILE",
    help="A redis-server or valkey-server to test with, besides the installed ones.",
)
@click.option(
    "--postgres",
    type=_PATHS,
    multiple=True,
    metavar="FOLDER",
    help="A folder with a postgres to test with, besides the installed ones.",
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    / "synapse_replication"
    / "matrix",
    show_default=True,
    help="The folder for environments, which are reused.",
)
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder for the tests' output; by default a new one.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=900.0,
    show_default=True,
    help="The most time for one group of tests, in s.",
)
@click.option("--list", "lists", is_flag=True, help="Print the rows, and exit.")
@click.argument("names", nargs=-1, metavar="[ROW]...")
def matrix(
    fast: bool,
    redis: tuple[Path, ...],
    postgres: tuple[Path, ...],
    cache: Path,
    logs: Path | None,
    timeout: float,
    lists: bool,
    names: tuple[str, ...],
) -> None:
    """Run tests with many versions, and write docs/compatibility.csv.

    ROW is for instance synapse-1.163 or python-3.10; by default, all rows run. The
    table is updated after each row. The exit status is 0 only if all tests passed.
    """
    rows = {
        row.name: row
        for row in all_rows(
            fast=fast,
            redis=(*installed_redis(os.environ), *redis),
            postgres=(*installed_postgres(os.environ), *postgres),
        )
    }
    if unknown := set(names) - set(rows):
        raise click.BadParameter(
            f"{', '.join(sorted(unknown))}: the rows are {', '.join(rows)}"
        )
    if lists:
        click.echo("\n".join(rows))
        return
    logs = logs or Path(tempfile.mkdtemp(prefix="matrix-"))
    logs.mkdir(parents=True, exist_ok=True)
    click.echo(f"The output of the tests is in {logs}.")
    is_good = True
    for name in names or rows:
        try:
            python = create_environment(rows[name], cache)
        except MatrixError as error:
            click.echo(f"{name}: not installable: {error}")
            is_good = False
            continue
        result = run_row(rows[name], python, logs.absolute(), timeout)
        click.echo(f"{name} ({result.installed}): {result.outcome}")
        update_table([result], TABLE)
        is_good = is_good and result.is_good
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    matrix()
