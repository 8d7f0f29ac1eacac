"""A process under a service manager: status notifications, and configuration reloads.

The commands ``main`` and ``worker`` run a :class:`SupervisedProcess`. Under systemd
(``Type=notify``) it reports when it is ready, its status, and that it is alive. On
SIGHUP it reloads the configuration and applies the settings that can change at run
time; an invalid configuration changes nothing.

See docs/operators-guide.rst.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger

from synapse_replication.app.systemd import SystemdNotifier
from synapse_replication.config.process import ProcessConfig
from synapse_replication.errors import ConfigError

if TYPE_CHECKING:
    # It needs the database driver.
    from synapse_replication.app.service import Replication

#: Attributes of :class:`ProcessConfig` that are not settings.
_NOT_SETTINGS = frozenset({"files", "warnings"})


def needs_restart(old: ProcessConfig, new: ProcessConfig) -> list[str]:
    """Return the changed keys that take effect only after a restart of the process."""
    applied = {"log_level"}
    if (old.backlog is None) == (new.backlog is None):
        applied.add("backlog")
    return [
        old.key_of(field.name)
        for field in attrs.fields(ProcessConfig)
        if field.name not in applied | _NOT_SETTINGS
        and getattr(old, field.name) != getattr(new, field.name)
    ]


@attrs.define(eq=False, repr=False)
class SupervisedProcess:
    """Runs a process, and reports its status to the service manager.

    :param process: the process to run.
    :param config: the configuration of the process.
    :param read_config: reads the configuration from its files.
    :param set_log_level: sets the log level, by its name.
    :param systemd: reports to systemd; ``None`` if it did not start this process.
    :ivar started: fires when the process is up; fails if it cannot start.
    """

    log = Logger()

    _process: Replication
    _config: ProcessConfig
    _read_config: Callable[[], ProcessConfig]
    _set_log_level: Callable[[str], None]
    _systemd: SystemdNotifier | None = None
    started: Deferred[None] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.started = self._process.started

    def startService(self) -> None:
        """Start the process, and the notifications."""
        if (systemd := self._systemd) is not None:
            systemd.start()
            self.started.addCallback(lambda _: systemd.up())
        self._process.startService()

    def stopService(self) -> Deferred[Any]:
        """Stop the process; the Deferred fires when it has stopped."""
        if self._systemd is not None:
            self._systemd.stopping()
        return maybeDeferred(self._process.stopService)

    def reload(self) -> None:
        """Reload the configuration, and apply the settings that can change."""
        if self._systemd is not None:
            self._systemd.reloading()
        note = self._apply_new_config()
        if self._systemd is not None:
            self._systemd.reloaded(note)

    def _apply_new_config(self) -> str:
        """Read the configuration, and apply the settings that can change.

        :return: a short note for the operator; empty if the configuration is valid and
            no change requires a restart.
        """
        try:
            new = self._read_config()
        except (ConfigError, OSError) as error:
            self.log.error(
                "Cannot reload the configuration; the old one stays in use. Correct "
                "the files, then reload the configuration again:\n{error}",
                error=error,
            )
            self._process.hooks.configuration_reloaded(str(error), ())
            return "the configuration on disk is invalid, see the log"
        old, backlog = self._config, None
        self._set_log_level(new.log_level)
        if old.backlog is not None and new.backlog is not None:
            backlog = new.backlog
            self._process.resize_backlog(backlog)
        self._config = attrs.evolve(
            old, log_level=new.log_level, backlog=backlog or old.backlog
        )
        self.log.info(
            "Reloaded the configuration; log_level is {least}, backlog_rows "
            "{rows} and backlog_bytes {size}",
            least=new.log_level,
            rows=backlog.max_rows if backlog else "unchanged",
            size=backlog.max_bytes if backlog else "unchanged",
        )
        later = needs_restart(old, new)
        self._process.hooks.configuration_reloaded("", later)
        if not later:
            return ""
        keys = ", ".join(later)
        self.log.warn(
            "Changes to {keys} take effect only after a restart of this process",
            keys=keys,
        )
        return f"restart to use the new {keys}"
