"""A process under a service manager: status notifications, and configuration reloads.

The commands ``main`` and ``worker`` run a :class:`SupervisedProcess`. Under systemd
(``Type=notify``) it reports when it is ready, its status, and that it is alive. On
SIGHUP it reloads the configuration and applies the settings that can change at run
time; an invalid configuration changes nothing.

Theory of operation: systemd sets ``NOTIFY_SOCKET`` to the path of a Unix socket and
reads one datagram of ``NAME=value`` lines per notification. A :class:`SystemdNotifier`
checks the status once a second, and reports changes: ``READY=1`` once the process has
caught up, and ``STATUS=`` whenever the status changes. Writers that the status reports
as gone, or as not having sent POSITION, do not delay ``READY=1``. The reactor feeds the
watchdog twice as often as systemd requires. If the reactor hangs, the watchdog is not
fed: systemd kills the process, and restarts it if the unit has a suitable ``Restart=``.

The protocol is implemented here, because it is simple, and the package for it on PyPI
has not been maintained since 2017 and ignores failures.

A host runs a :class:`SystemdNotifier` of its own, so this module imports no
configuration.

See ``man sd_notify``, ``man systemd.service`` and docs/operators-guide.rst.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger

from synapse_replication.errors import ConfigError, SupervisorError
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.timer import Timer
from synapse_replication.instrumentation.logs import RateLimit
from synapse_replication.instrumentation.status.assessment import describe_process
from synapse_replication.instrumentation.status.model import ProcessStatus

if TYPE_CHECKING:
    # It needs the database driver.
    from synapse_replication.app.service import Replication
    from synapse_replication.config.process import ProcessConfig

#: The interval of checks of the status, in s.
STATUS_CHECK_INTERVAL = 1.0
#: While the process starts, it extends systemd's timeout every ``EXTEND_INTERVAL`` s,
#: because catching up may take hours. Each extension ends ``EXTEND_BY`` s after it was
#: sent. If the reactor hangs, the timeout expires, and systemd stops the process.
EXTEND_BY = 60.0
EXTEND_INTERVAL = 15.0


class NotifySocket:
    """A socket to systemd. Each kind of failure is logged at most once a minute.

    :param address: a path, or ``@`` followed by the name of an abstract socket.
    :ivar feed_interval: the interval at which to feed the watchdog, in s; ``None`` for
        never.
    """

    log = Logger()

    def __init__(self, address: str, feed_interval: float | None = None) -> None:
        self.feed_interval = feed_interval
        self._shown = address
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._limit = RateLimit(time.monotonic)
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        )
        # The reactor must not wait for systemd.
        self._socket.setblocking(False)

    def send(self, *assignments: str) -> bool:
        """Send one message.

        :return: whether it was sent.
        """
        message = "\n".join(" ".join(each.splitlines()) for each in assignments)
        try:
            self._socket.sendto(message.encode("utf-8", "replace"), self._address)
        except OSError as error:
            if self._limit.admit("notify", error.errno) is not None:
                self.log.warn(
                    "Cannot notify systemd (NOTIFY_SOCKET={address}): {error}",
                    address=self._shown,
                    error=error,
                )
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def open_notify_socket(environ: Mapping[str, str], pid: int) -> NotifySocket | None:
    """Open the socket that ``NOTIFY_SOCKET`` names.

    :return: ``None`` if the variable is not set.
    :raises SupervisorError: if the kind of address is not supported, or see
        :func:`watchdog_interval`.
    """
    feed_interval = watchdog_interval(environ, pid)
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return None
    if address[0] not in "/@":
        raise SupervisorError(
            f"NOTIFY_SOCKET is {address!r}, which is neither a path nor the name of an "
            "abstract socket; unset it, or let systemd set it"
        )
    return NotifySocket(address, feed_interval)


def watchdog_interval(environ: Mapping[str, str], pid: int) -> float | None:
    """Return the interval at which to feed systemd's watchdog.

    :return: half of ``WATCHDOG_USEC``, in s; ``None`` if the variable is not set, or
        meant for another process (``WATCHDOG_PID``).
    :raises SupervisorError: if the value is not a positive whole number.
    """
    text = environ.get("WATCHDOG_USEC", "")
    if not text or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise SupervisorError(
            f"WATCHDOG_USEC is {text!r}, which is not a number of microseconds; unset "
            "it, or let systemd set it by WatchdogSec="
        )
    return int(text) / 2_000_000


@attrs.define(eq=False, repr=False)
class SystemdNotifier:
    """Reports changes of the status to systemd.

    Call its methods in the reactor's thread.

    :param notify: systemd's socket, which :meth:`stopping` closes.
    :param clock: schedules the checks.
    :param snapshot: returns the current status.
    :param reports_lifecycle: whether to report that the process is ready, reloads or
        stops, in addition to its status; ``False`` inside a host that reports this.
    """

    _notify: NotifySocket
    _clock: Clock
    _snapshot: Callable[[], ProcessStatus]
    _reports_lifecycle: bool = attrs.field(default=True, kw_only=True)
    _is_up: bool = attrs.field(default=False, init=False)
    _is_ready: bool = attrs.field(default=False, init=False)
    _is_reloading: bool = attrs.field(default=False, init=False)
    _reported: str = attrs.field(default="", init=False)
    _note: str = attrs.field(default="", init=False)
    _extended: float = attrs.field(default=float("-inf"), init=False)
    _checking: Timer = attrs.field(init=False)
    _feeding: Timer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._checking = Timer(self._clock)
        self._feeding = Timer(self._clock)

    def start(self) -> None:
        """Start to report the status, and to feed the watchdog."""
        self._check_status()
        self._feed()

    def up(self) -> None:
        """Record that the process has started, although it may not have caught up."""
        self._is_up = True
        self._check_status()

    def reloading(self) -> None:
        """Report that the configuration is being reloaded, if the process is ready."""
        if self._is_ready:
            now = time.monotonic_ns() // 1000
            self._is_reloading = self._notify.send(
                "RELOADING=1", f"MONOTONIC_USEC={now}"
            )

    def reloaded(self, note: str = "") -> None:
        """Report that the reload has ended.

        :param note: a text that is appended to the status from now on.
        """
        self._note = note
        self._check_status()

    def stopping(self) -> None:
        """Report that the process stops, end all reports, and close the socket."""
        self._checking.stop()
        self._feeding.stop()
        lifecycle = ["STOPPING=1"] if self._reports_lifecycle else []
        self._notify.send(*lifecycle, "STATUS=stopping")
        self._notify.close()

    def _feed(self) -> None:
        if self._notify.feed_interval is not None:
            self._feeding.start(self._notify.feed_interval, self._feed)
            self._notify.send("WATCHDOG=1")

    def _check_status(self) -> None:
        # Reschedule first, so that an exception cannot stop the timer.
        self._checking.start(STATUS_CHECK_INTERVAL, self._check_status)
        status = self._snapshot()
        text = describe_process(status) if self._is_up else "starting"
        if self._note:
            text += f"; {self._note}"
        changes = [f"STATUS={text}"] if text != self._reported else []
        becomes_ready = False
        if self._reports_lifecycle:
            becomes_ready = not self._is_ready and self._is_up and not status.not_ready
            changes += self._lifecycle_changes(becomes_ready)
        # Changes that could not be sent are reported again at the next check. A failed
        # extension of the timeout is not: the next one follows EXTEND_INTERVAL s later.
        if changes and self._notify.send(*changes):
            self._reported = text
            self._is_ready = self._is_ready or becomes_ready
            self._is_reloading = False

    def _lifecycle_changes(self, becomes_ready: bool) -> list[str]:
        if becomes_ready or self._is_reloading:
            return ["READY=1"]
        now = self._clock.seconds()
        if self._is_ready or now - self._extended < EXTEND_INTERVAL:
            return []
        self._extended = now
        return [f"EXTEND_TIMEOUT_USEC={int(EXTEND_BY * 1_000_000)}"]


def needs_restart(old: ProcessConfig, new: ProcessConfig) -> list[str]:
    """Return the changed keys that take effect only after a restart of the process."""
    # The files and the warnings are not settings.
    applied = {"log_level", "files", "warnings"}
    if (old.backlog is None) == (new.backlog is None):
        applied.add("backlog")
    return sorted(
        old.key_of(field.name)
        for field in attrs.fields(type(old))
        if field.name not in applied
        and getattr(old, field.name) != getattr(new, field.name)
    )


@attrs.define(eq=False, repr=False)
class SupervisedProcess:
    """Runs a process, and reports its status to the service manager.

    :param process: the process to run.
    :param config: the configuration of the process.
    :param read_config: reads the configuration from its files.
    :param set_log_level: sets the log level, by its name.
    :param systemd: reports to systemd; ``None`` if it did not start this process.
    :ivar started: fires when the process is up; fails if it cannot start.
    :ivar lost: fails if the process has lost its name.
    """

    log = Logger()

    _process: Replication
    _config: ProcessConfig
    _read_config: Callable[[], ProcessConfig]
    _set_log_level: Callable[[str], None]
    _systemd: SystemdNotifier | None = None
    started: Deferred[None] = attrs.field(init=False)
    lost: Deferred[None] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.started = self._process.started
        self.lost = self._process.lost

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

    @property
    def unfinished(self) -> str:
        """The work that the stop did not finish; empty if none."""
        return self._process.unfinished

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
