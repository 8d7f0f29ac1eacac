"""Options that the pipeline's commands share.

A password can be in a configuration file or in the environment, so that it need not be
on the command line, which every user of the machine can read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from synapse_replication.cli.common import config_files, fail
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.settings import PipelineSettings

#: The environment variable that is used if neither ``-c`` nor ``--dsn`` is given.
DSN_VARIABLE = "SYNAPSE_REPLICATION_DSN"

_Command = Callable[..., Any]


master_option = click.option(
    "--master",
    metavar="URL",
    help="Where Spark runs, for instance spark://host:7077. Without this option, "
    "Spark's configuration applies; if that names none, Spark runs on this machine.",
)

archive_option = click.option(
    "--archive",
    required=True,
    metavar="DIR|URI",
    help="The archive: a folder, or s3://BUCKET/PATH with credentials in Amazon's "
    "environment variables.",
)

json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result as JSON on standard output, for programs.",
)


recordings_option = click.option(
    "--recording",
    "recordings",
    multiple=True,
    metavar="PATH",
    help="A recording of the wire, or a folder of them. May be repeated.",
)


def source_options(command: _Command, *, required: bool = True) -> _Command:
    """Add the options for the database; pass the settings to a command as ``settings``.

    The options are ``-c`` and ``--dsn``; without them, the environment variable
    :data:`DSN_VARIABLE` is used. The command exits with status 2 if both options are
    given, or if a value is invalid.

    :param required: whether it also exits with status 2 without an option and the
        variable. Otherwise, ``settings`` is ``None`` then.
    """

    @config_files(required=False)
    @click.option(
        "--dsn",
        envvar=DSN_VARIABLE,
        metavar="DSN",
        help="A connection string of libpq for the database, instead of -c. Keep the "
        f"password off the command line: set the environment variable {DSN_VARIABLE}, "
        "or store the password in ~/.pgpass.",
    )
    @click.pass_context
    @functools.wraps(command)
    def with_settings(
        ctx: click.Context,
        /,
        config_paths: tuple[str, ...],
        dsn: str | None,
        **more: Any,
    ) -> Any:
        typed = ctx.get_parameter_source("dsn") is ParameterSource.COMMANDLINE
        if config_paths and typed:
            raise click.UsageError("use -c or --dsn, not both", ctx)
        settings = _settings(config_paths, dsn)
        if settings is None and required:
            raise click.UsageError(
                "no database was named: use -c with the homeserver's configuration, or "
                f"--dsn, or set {DSN_VARIABLE}",
                ctx,
            )
        return command(settings=settings, **more)

    return with_settings


#: Adds the options of :func:`source_options`, without requiring any of them.
optional_source_options = functools.partial(source_options, required=False)


def _settings(
    config_paths: tuple[str, ...], dsn: str | None
) -> PipelineSettings | None:
    try:
        if config_paths:
            return PipelineSettings.of_config(config_paths)
        return PipelineSettings.of_dsn(dsn) if dsn else None
    except PipelineError as error:
        fail(f"Error: {error}")
