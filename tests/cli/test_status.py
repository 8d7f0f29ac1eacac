"""Tests for :mod:`synapse_replication.cli.status`."""

from __future__ import annotations

import io
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from rich.console import Console
from twisted.internet.task import Clock
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.server import Site

from synapse_replication.cli.main import cli
from synapse_replication.cli.status import (
    REFRESH_INTERVAL,
    DeploymentStatus,
    StatusService,
    render,
)
from synapse_replication.errors import HttpCatchUpError
from synapse_replication.handlers.events import (
    CatchUpEvent,
    ConnectFailed,
    DuplicateInstance,
    PeerHeartbeat,
)
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.instrumentation.status.model import encode_status
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.streams.stuck_ids import StuckId
from tests.http.doubles import Directory, FailureObserver
from tests.support.config_files import FilesMixin
from tests.support.http_root import under_root
from tests.support.known_readers import KnownReaders

ROOT = Path(__file__).parents[2]


def make_status(clock: Clock, name: str = "me") -> tuple[StatusObserver, KnownReaders]:
    observer = StatusObserver(
        "x.test", name, [("events", "w1")], monotonic=clock.seconds
    )
    known = KnownReaders(observer)
    known.link_up()
    known.go_live("events", "w1", 1000)
    return observer, known


def draw(
    deployment: DeploymentStatus, *, everything: bool = False, width: int = 200
) -> str:
    out = io.StringIO()
    shown = render(deployment, everything=everything)
    Console(file=out, width=width).print(shown, soft_wrap=True)
    return out.getvalue()


class RenderTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.status, self.known = make_status(self.clock)

    def draw(self) -> str:
        return draw(DeploymentStatus({"me": self.status.snapshot()}, {}))

    def test_healthy(self) -> None:
        """A healthy instance has a summary line, and a row for each writer."""
        deployment = DeploymentStatus({"me": self.status.snapshot()}, {})
        text = draw(deployment, everything=True)
        self.assertIn("me: All rows arrive\n", text)
        self.assertRegex(text, r"me +events +w1 +live +1,000 +0")

    def test_what_is_wrong(self) -> None:
        """By default, writers that need no attention are only counted."""
        text = self.draw()
        self.assertNotIn("Stream", text)
        self.assertEqual(
            text, "me: All rows arrive\n1 instance: 1 well; writers: 1 live\n"
        )

    def test_stock(self) -> None:
        """A stock instance that runs is no problem."""
        deployment = DeploymentStatus({}, {"w1": "refused"}, (), ("master", "w2"))
        self.assertEqual(
            draw(deployment),
            "w1: no valid status: refused\nmaster: stock, running\n"
            "w2: stock, running\n3 instances: 1 not answering, 2 stock\n",
        )
        self.assertTrue(DeploymentStatus({}, {}, (), ("master",)).is_well)

    def test_names_are_not_cut(self) -> None:
        """At 80 columns, long names are wrapped, but not cut."""
        name = "matrix-synapse-worker-stream-writer-0-typing"
        self.status.position_changed("un_partial_stated_event", name, 5)
        deployment = DeploymentStatus({name: self.status.snapshot()}, {})
        text = draw(deployment, everything=True, width=80)
        self.assertIn(f"{name}  un_partial_stated_event  {name}  ", text)

    def test_stalled(self) -> None:
        """A stalled stream is shown with the duration, the reason and a hint."""
        self.known.announce("events", "w1", 2000)
        self.clock.advance(150)
        text = self.draw()
        self.assertIn("me: 1 of 1 stream stalled", text)
        self.assertIn("events/w1: stalled for 2 min: rows were announced", text)
        self.assertIn("-> The sink of this process seems to be blocked", text)
        self.assertRegex(text, r"stalled +1,000 +1,000 +2 min")

    def test_catching_up(self) -> None:
        """A catch-up is shown with its progress."""
        self.known.fetch(CatchUpEvent("events", "w1", 1000, 2000))
        self.assertIn("catching up, 0 of 1,000", self.draw())

    def test_others(self) -> None:
        """
        Duplicate names, lost links, unreachable instances and instances that were not
        queried are shown.
        """
        self.status.observe(DuplicateInstance("w1", ""))
        self.status.observe(ConnectFailed("w2", "refused", 1.0))
        deployment = DeploymentStatus(
            {"me": self.status.snapshot()}, {"w9": "refused"}, ("w3", "w4")
        )
        text = draw(deployment)
        self.assertIn("two processes are called w1 (locations unknown)", text)
        self.assertIn("(down: w2)", text)
        self.assertIn("w9: no valid status: refused", text)
        self.assertIn("Not in instance_map, but alive: w3, w4", text)

    def test_stuck_id(self) -> None:
        """A stuck id is shown with its session and a hint; it is a problem."""
        stuck = StuckId("events", 7, "w1", 150.0, "session 12, idle", "End it.")
        self.known.connect(stuck_ids=lambda: [stuck])
        text = self.draw()
        self.assertIn("me: An id is stuck", text)
        self.assertIn(
            "is not finished for 2 min: session 12, idle",
            text,
        )
        self.assertIn("-> End it.", text)
        deployment = DeploymentStatus({"me": self.status.snapshot()}, {})
        self.assertFalse(deployment.is_well)

    def test_damage(self) -> None:
        """Damaged rows of the sink are shown, and are a problem."""
        self.known.connect(damage="journal has 1 damaged line(s)")
        text = self.draw()
        self.assertIn("me: Stored rows are damaged", text)
        self.assertIn("journal has 1 damaged line(s)", text)
        deployment = DeploymentStatus({"me": self.status.snapshot()}, {})
        self.assertFalse(deployment.is_well)

    def test_worst_first(self) -> None:
        """Instances that do not respond are first, then instances with problems."""
        stalled, known = make_status(self.clock)
        known.announce("events", "w1", 2000)
        self.clock.advance(60)
        behind, known = make_status(self.clock)
        known.fetch(CatchUpEvent("events", "w1", 1000, 2000))
        processes = {
            "a_well": make_status(self.clock)[0].snapshot(),
            "b_busy": behind.snapshot(),
            "c_stalled": stalled.snapshot(),
        }
        text = draw(DeploymentStatus(processes, {"w9": "refused"}))
        heads = [
            line.partition(":")[0]
            for line in text.splitlines()
            if line and not line.startswith(" ") and ":" in line
        ]
        self.assertEqual(heads[:-1], ["w9", "c_stalled", "b_busy", "a_well"])
        self.assertIn("4 instances: 1 not answering, 1 with a problem", text)

    def test_terminals_are_not_steered(self) -> None:
        """Control characters in names are escaped."""
        for name in ("w2\x1b[2J", "w3\n\x07", "w4\u202e"):
            self.status.position_changed("events\x1b]0;", name, 1)
            self.status.observe(PeerHeartbeat(name, "e", "", "", True, {}))
            self.status.observe(DuplicateInstance(name, ""))
        self.status.position_changed("events", "w\u00e9", 1)
        self.clock.advance(20)
        text = draw(
            DeploymentStatus(
                {"me": self.status.snapshot()}, {"w9": "\x1b[1m"}, ("w\x1b[1m",)
            )
        )
        self.assertEqual([c for c in text if not c.isprintable() and c != "\n"], [])
        for shown in (r"w2\x1b[2J", r"w3\n\x07", r"w4\u202e", "w\u00e9"):
            self.assertIn(shown, text)


class DeploymentStatusTests(SynchronousTestCase):
    def test_healthy(self) -> None:
        """
        A deployment is healthy if all instances respond, and none is stalled or has a
        duplicate name.
        """
        clock = Clock()
        observer, known = make_status(clock)
        well = observer.snapshot()
        self.assertTrue(DeploymentStatus({"me": well}, {}).is_well)
        self.assertFalse(DeploymentStatus({"me": well}, {"w": "no"}).is_well)
        writer = StatusObserver("x.test", "w", monotonic=clock.seconds)
        writer.observe(ConnectFailed("redis", "refused", 1.0))
        self.assertTrue(DeploymentStatus({"w": writer.snapshot()}, {}).is_well)
        clock.advance(10)
        self.assertFalse(DeploymentStatus({"w": writer.snapshot()}, {}).is_well)
        observer.observe(DuplicateInstance("w1", ""))
        self.assertFalse(DeploymentStatus({"me": observer.snapshot()}, {}).is_well)
        clock.advance(100)
        known.announce("events", "w1", 2000)
        clock.advance(100)
        self.assertFalse(DeploymentStatus({"me": observer.snapshot()}, {}).is_well)


class StatusServiceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.shown: list[DeploymentStatus] = []
        self.ends: list[str] = []
        self.status, self.known = make_status(self.clock)

    async def ask(self, name: str) -> bytes:
        if name == "stock":
            raise HttpCatchUpError(
                "GET", "http://s/", 404, '{"errcode":"M_UNRECOGNIZED","error":"x"}'
            )
        if name == "w9":
            raise HttpCatchUpError("GET", "http://w9/", None, "refused")
        return encode_status(self.status.snapshot())

    def make(self, *names: str, watch: bool = False) -> StatusService:
        return StatusService(
            self.clock,
            self.ask,
            names,
            self.shown.append,
            lambda: self.ends.append("end"),
            close=lambda: self.ends.append("close"),
            watch=watch,
        )

    def test_once(self) -> None:
        """Without watching, each instance is queried once, and the service stops."""
        service = self.make("me")
        service.startService()
        self.successResultOf(service.started)
        self.assertEqual(self.ends, ["end"])
        self.clock.advance(100)
        self.assertEqual(len(self.shown), 1)
        self.assertTrue(service.is_well)
        service.stopService()
        self.assertEqual(self.ends, ["end", "close"])

    def test_unreachable_instance(self) -> None:
        """
        An unreachable instance is shown with the reason, next to the other instances.
        """
        self.status.observe(PeerHeartbeat("w2", "e", "", "", False, {}))
        self.status.observe(PeerHeartbeat("w9", "e", "", "", False, {}))
        service = self.make("me", "w9")
        service.startService()
        (shown,) = self.shown
        self.assertEqual(list(shown.processes), ["me"])
        self.assertIn("refused", shown.unreachable["w9"])
        self.assertEqual(shown.not_in_instance_map, ("w2",))
        self.assertFalse(service.is_well)

    def test_stock(self) -> None:
        """The answer of a stock instance to an unknown path shows that it runs."""
        service = self.make("stock", "me")
        service.startService()
        self.assertEqual(self.shown[0].stock, ("stock",))
        self.assertTrue(service.is_well)

    def test_misdirected(self) -> None:
        """An answer of another instance is a problem."""
        service = self.make("w1")
        service.startService()
        self.assertIn("me answered at its address", self.shown[0].unreachable["w1"])
        self.assertEqual(self.shown[0].processes, {})
        self.assertFalse(service.is_well)

    def test_watch(self) -> None:
        """Watching continues until the service is stopped."""
        service = self.make("me", watch=True)
        service.startService()
        self.clock.advance(REFRESH_INTERVAL)
        self.assertEqual(len(self.shown), 2)
        self.assertEqual(self.ends, [])
        service.stopService()
        self.clock.advance(REFRESH_INTERVAL)
        self.assertEqual(len(self.shown), 2)
        self.assertEqual(self.ends, ["close"])

    def test_cannot_be_shown(self) -> None:
        """
        If the status cannot be shown, the error is logged, and the service stops with
        the result unhealthy.
        """
        service = self.make("me")
        service._show = lambda deployment: 1 / 0
        service.startService()
        self.assertEqual(self.ends, ["end"])
        self.assertFalse(service.is_well)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class NoInstancesTests(FilesMixin):
    def test_exit_status(self) -> None:
        """Without an instance_map, the configuration is reported as invalid."""
        path = self.write(
            "h.yaml", "server_name: x.test\nredis: {enabled: true, host: h}\n"
        )
        result = CliRunner().invoke(cli, ["status", "-c", path])
        self.assertEqual(result.exit_code, 2)
        self.assertIn("instance_map", result.output)


class CommandTests(TestCase):
    """Tests that run the command with an HTTP port of the test."""

    def setUp(self) -> None:
        # The command runs in its own process, so that trial's reactor can serve it.
        from twisted.internet import reactor as running  # noqa: TID251

        reactor: Any = running

        self.clock = Clock()
        self.status, self.known = make_status(self.clock, "master")
        replication = ReplicationResource(
            Directory(),
            "master",
            "hush",
            FailureObserver(),
            status=lambda: encode_status(self.status.snapshot()),
        )
        self.port = reactor.listenTCP(
            0, Site(under_root(replication)), interface="127.0.0.1"
        )
        self.addCleanup(self.port.stopListening)

    def arguments(self, secret: str = "hush") -> list[str]:
        path = Path(self.mktemp())
        path.write_text(
            f"server_name: x.test\nredis: {{enabled: true, host: h}}\n"
            f"worker_replication_secret: {secret}\ninstance_map:\n"
            f"  main: {{host: 127.0.0.1, port: {self.port.getHost().port}}}\n"
        )
        return ["-m", "synapse_replication", "status", "-c", str(path)]

    async def run_status(
        self, *more: str, secret: str = "hush"
    ) -> tuple[str, str, int]:
        out, err, code = await getProcessOutputAndValue(
            sys.executable,
            [*self.arguments(secret), *more],
            {**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return out.decode(), err.decode(), code

    async def run_in_shell(self, how: str) -> str:
        """Return what the command prints to both streams, one of them redirected."""
        command = shlex.join([sys.executable, *self.arguments(), "--all"])
        out, err, _ = await getProcessOutputAndValue(
            "/bin/sh",
            ["-c", f"{command} {how}"],
            {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYTHONIOENCODING": "latin-1",
                "PYTHONUTF8": "0",
            },
        )
        text: str = (out + err).decode("latin-1")
        return text

    async def test_healthy_and_stalled(self) -> None:
        """
        The exit status is 0 if the deployment is healthy, and 1 if a writer is stalled.
        """
        out, err, code = await self.run_status()
        self.assertEqual((code, err), (0, ""), out)
        self.assertIn("All rows arrive", out)
        self.known.announce("events", "w1", 2000)
        self.clock.advance(60)
        out, err, code = await self.run_status("--json")
        self.assertEqual((code, err), (1, ""))
        self.assertIn('"reason":"no_progress"', out)

    async def test_output(self) -> None:
        """The output may be closed, full or a terminal without Unicode."""
        name = "w\u00e9\u4e2d"
        self.status.position_changed("events", name, 5)
        for how, expected in (
            (">&-", ""),
            (">/dev/full", "synapse-replication: cannot write: No space left"),
            ("| cat", "w\u00e9\\u4e2d"),
        ):
            out = await self.run_in_shell(how)
            self.assertNotIn("Traceback", out)
            self.assertIn(expected, out, f"{how}: {out}")

    async def test_wrong_secret(self) -> None:
        """With a wrong secret, no status is shown, and the error says what to do."""
        out, _, code = await self.run_status(secret="wrong")
        self.assertEqual(code, 1)
        self.assertIn("no valid status", out)
        self.assertIn("the same replication secret", " ".join(out.split()))
