"""The ``twist`` plugin's options and service.

``twist synapse-replication -c homeserver.yaml -c worker.yaml``: a worker if the
files have a ``worker_name``, else the main process.
"""

from __future__ import annotations

from typing import Any

from twisted.application.service import IService
from twisted.logger import Logger
from twisted.python import usage
from twisted.python.failure import Failure

from synapse_replication.app.config import load_config
from synapse_replication.app.services import make_process
from synapse_replication.errors import ConfigError

__all__ = ["Options", "makeService"]

_log = Logger()


class Options(usage.Options):
    """What follows ``twist synapse-replication``."""

    synopsis = "-c FILE [-c FILE ...]"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["config"] = []

    def opt_config(self, path: str) -> None:
        """A YAML file, or a folder of them; later files win per top-level key."""
        self["config"].append(path)

    opt_c = opt_config

    def postOptions(self) -> None:
        if not self["config"]:
            raise usage.UsageError("name the configuration with -c FILE")
        try:
            self["parsed"] = load_config(self["config"])
        except ConfigError as error:
            raise usage.UsageError(f"mistakes in the configuration:\n{error}") from None


def makeService(options: Options) -> IService:
    """Make the service; its process ends if it cannot start."""
    # twist has installed the reactor by now; a plugin is not given it.
    from twisted.internet import reactor  # noqa: TID251

    running: Any = reactor
    process = make_process(options["parsed"], running)

    def failed(failure: Failure) -> None:
        _log.failure("synapse-replication could not start", failure)
        running.stop()

    process.started.addErrback(failed)
    return process
