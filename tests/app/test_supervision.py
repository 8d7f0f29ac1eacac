"""Tests for synapse_replication.app.supervision."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent

from synapse_replication.app.service_runner import Runnable
from synapse_replication.app.supervision import (
    SupervisedProcess,
    needs_restart,
)
from synapse_replication.app.systemd import NotifySocket, SystemdNotifier
from synapse_replication.clock import ReactorClock
from synapse_replication.config.process import (
    ProcessConfig,
    load_config,
)
from synapse_replication.instrumentation.status.model import ProcessStatus
from synapse_replication.streams.backlog import BacklogOptions
from tests.support.config_files import FilesMixin


class FakeProcess:
    """A process that a test controls; it is its own hooks."""

    def __init__(self) -> None:
        self.started: Deferred[None] = Deferred()
        self.hooks = self
        self.sizes: list[BacklogOptions] = []
        self.reloads: list[tuple[str, tuple[str, ...]]] = []

    def startService(self) -> None:
        """Do nothing."""

    def stopService(self) -> Deferred[None]:
        return succeed(None)

    def snapshot(self) -> ProcessStatus:
        return ProcessStatus("x.test", "master", "1", 1.0, (), (), (), (), ())

    def resize_backlog(self, options: BacklogOptions) -> None:
        self.sizes.append(options)

    def configuration_reloaded(
        self, problem: str, needs_restart: Sequence[str]
    ) -> None:
        self.reloads.append((problem, tuple(needs_restart)))


class FakeNotify(NotifySocket):
    """Records messages instead of sending them."""

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.sent: list[tuple[str, ...]] = []
        self.is_closed = False

    def send(self, *assignments: str) -> bool:
        self.sent.append(assignments)
        return True

    def close(self) -> None:
        super().close()
        self.is_closed = True


if TYPE_CHECKING:
    _runnable: type[Runnable] = SupervisedProcess


class SupervisedProcessTests(FilesMixin):
    def setUp(self) -> None:
        super().setUp()
        self.settings: dict[str, Any] = {
            "server_name": "x.test",
            "redis": {"enabled": True, "host": "redis.test"},
            "database": {"name": "psycopg2", "args": {"host": "db.test"}},
            "synapse_replication": {
                "streams": [
                    "typing",
                    {
                        "name": "notes",
                        "table": "notes",
                        "id_column": "stream_id",
                        "columns": {"note": "text"},
                        "sequence": "notes_seq",
                        "writers": "master",
                    },
                ]
            },
        }
        self.process = FakeProcess()
        self.levels: list[str] = []
        self.notify = FakeNotify()
        self.addCleanup(self.notify.close)
        config = self.read_config()
        self.supervised = SupervisedProcess(
            cast(Any, self.process),
            config,
            self.read_config,
            self.levels.append,
            SystemdNotifier(self.notify, ReactorClock(Clock()), self.process.snapshot),
        )

    def read_config(self) -> ProcessConfig:
        return load_config([self.write("h.yaml", json.dumps(self.settings))])

    def start_process(self) -> None:
        self.supervised.startService()
        self.process.started.callback(None)
        self.notify.sent.clear()

    def change_own_settings(self, **settings: Any) -> None:
        self.settings["synapse_replication"].update(settings)

    def reload(self) -> list[tuple[str, str]]:
        """Reload the configuration.

        :return: (level, message) of each logged event.
        """
        with capturedLogs() as logs:
            self.supervised.reload()
        return [(event["log_level"].name, formatEvent(event)) for event in logs]

    def test_from_start_to_stop(self) -> None:
        """The manager is notified of start, readiness and stop."""
        self.supervised.startService()
        self.assertEqual(self.notify.sent[0][0], "STATUS=starting")
        self.process.started.callback(None)
        self.assertEqual(
            self.notify.sent[-1], ("STATUS=live: follows no other process", "READY=1")
        )
        self.successResultOf(self.supervised.stopService())
        self.assertEqual(self.notify.sent[-1][0], "STOPPING=1")
        self.assertTrue(self.notify.is_closed)

    def test_does_not_start(self) -> None:
        """
        If the process cannot start, READY is not sent, and the failure is propagated.
        """
        self.supervised.startService()
        self.process.started.errback(OSError("no"))
        self.failureResultOf(self.supervised.started, OSError)
        self.assertFalse(any("READY=1" in sent for sent in self.notify.sent))

    def test_applied_immediately(self) -> None:
        """The log level and the backlog sizes change immediately."""
        self.start_process()
        self.change_own_settings(
            log_level="debug", extension={"backlog_rows": 5, "backlog_bytes": 6}
        )
        ((level, text),) = self.reload()
        self.assertEqual(level, "info")
        self.assertIn("log_level is debug, backlog_rows 5 and backlog_bytes 6", text)
        self.assertEqual(self.levels, ["debug"])
        self.assertEqual(self.process.sizes, [BacklogOptions(5, 6)])
        (begin, end) = self.notify.sent
        self.assertEqual(begin[0], "RELOADING=1")
        self.assertEqual(end, ("READY=1",))

    def test_invalid_configuration(self) -> None:
        """An invalid configuration changes nothing, and all its problems are logged."""
        self.start_process()
        self.change_own_settings(log_level="loud", extension={"backlog_rows": -5})
        ((level, text),) = self.reload()
        self.assertEqual(level, "error")
        self.assertIn("the old one stays in use", text)
        self.assertIn("synapse_replication.log_level", text)
        self.assertIn("synapse_replication.extension.backlog_rows", text)
        self.assertEqual((self.levels, self.process.sizes), ([], []))
        ((problem, later),) = self.process.reloads
        self.assertIn("synapse_replication.log_level", problem)
        self.assertEqual(later, ())
        self.assertIn("is invalid, see the log", self.notify.sent[-1][0])
        self.assertEqual(self.notify.sent[-1][1], "READY=1")

    def test_no_file(self) -> None:
        """If the file is missing, nothing changes, and an error is logged."""
        self.start_process()

        def read() -> ProcessConfig:
            raise FileNotFoundError(2, "No such file", "h.yaml")

        self.supervised._read_config = read
        ((level, text),) = self.reload()
        self.assertEqual(level, "error")
        self.assertIn("h.yaml", text)

    def test_problems_fixed(self) -> None:
        """After the problems are fixed, the status no longer mentions them."""
        self.start_process()
        self.change_own_settings(log_level="loud")
        self.reload()
        self.change_own_settings(log_level="warn")
        self.reload()
        self.assertEqual(
            self.notify.sent[-1], ("STATUS=live: follows no other process", "READY=1")
        )
        self.assertEqual(self.levels, ["warn"])

    def test_needs_a_restart(self) -> None:
        """
        A change that needs a restart is logged at each reload until it is reverted.
        """
        self.start_process()
        self.settings["redis"]["host"] = "elsewhere.test"
        self.change_own_settings(extension={"enabled": False}, log_level="warn")
        for _ in range(2):
            _, (level, text) = self.reload()
            self.assertEqual(level, "warn")
            self.assertEqual(
                text,
                "Changes to redis, synapse_replication.extension.enabled take effect "
                "only after a restart of this process",
            )
        self.assertEqual(self.process.sizes, [])
        changed = ("redis", "synapse_replication.extension.enabled")
        self.assertEqual(self.process.reloads, [("", changed)] * 2)
        (_, (status, _), *_) = self.notify.sent
        self.assertIn("restart to use the new redis", status)
        self.settings["redis"]["host"] = "redis.test"
        self.change_own_settings(extension={"enabled": True})
        self.assertEqual(len(self.reload()), 1)

    def test_every_setting(self) -> None:
        """Any change except one of the log level is reported as needing a restart."""
        config = self.read_config()
        for field in attrs.fields(ProcessConfig):
            if field.name in ("files", "warnings", "log_level"):
                continue
            changed = copy.copy(config)
            other = None if getattr(config, field.name) is not None else "other"
            object.__setattr__(changed, field.name, other)
            self.assertEqual(len(needs_restart(config, changed)), 1, field.name)

    def test_without_a_manager(self) -> None:
        """Reloading works without systemd, too."""
        supervised = SupervisedProcess(
            cast(Any, self.process),
            self.read_config(),
            self.read_config,
            self.levels.append,
        )
        supervised.startService()
        self.process.started.callback(None)
        self.change_own_settings(log_level="critical")
        supervised.reload()
        self.assertEqual(self.levels, ["critical"])
        self.successResultOf(supervised.stopService())
