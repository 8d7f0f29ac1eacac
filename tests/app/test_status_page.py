"""Tests for :mod:`synapse_replication.app.status_page`."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

from treq.testing import StubTreq
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource

from synapse_replication.app import status_page
from synapse_replication.app.http_site import (
    ready_resource,
    status_json_resource,
    status_page_resource,
)
from synapse_replication.app.status_page import duration, judge, sparkline
from synapse_replication.handlers.events import (
    CatchUpEvent,
    CatchUpPage,
    ConnectFailed,
    DuplicateInstance,
    LinkDown,
    LinkUp,
    PeerHeartbeat,
)
from synapse_replication.instrumentation.status.model import (
    HINTS,
    StallReason,
    group_stalls,
)
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.streams.stuck_ids import StuckId
from synapse_replication.wire.close_reason import CloseReason
from tests.support.known_readers import KnownReaders
from tests.support.large_deployment import make_large_deployment


class PageMixin(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.patch(status_page, "time", SimpleNamespace(time=self.clock.seconds))
        writers = [("events", "w1"), ("events", "w2"), ("typing", "<w3>")]
        self.observer = StatusObserver(
            "x.test", "me", writers, monotonic=self.clock.seconds
        )
        self.known = KnownReaders(self.observer)

    def go_live(self, *writers: tuple[str, str]) -> None:
        self.known.link_up()
        for stream_name, instance_name in writers:
            self.known.go_live(stream_name, instance_name, 1234)

    def all_live(self) -> None:
        self.go_live(("events", "w1"), ("events", "w2"), ("typing", "<w3>"))

    def get(self, resource: Resource, query: str = "") -> tuple[Any, str]:
        http: Any = StubTreq(resource)
        response = self.successResultOf(http.get(f"http://process/{query}"))
        self.addCleanup(http.flush)
        return response, self.successResultOf(response.text())

    def page(self, query: str = "") -> str:
        resource = status_page_resource(self.observer.snapshot)
        response, text = self.get(resource, query)
        self.assertEqual(response.code, 200)
        return text


class StatusPageTests(PageMixin):
    def test_good(self) -> None:
        """
        The page starts with the verdict "All rows arrive", followed by a row per
        writer.
        """
        self.all_live()
        self.observer.sample()
        self.observer.sample()
        text = self.page()
        self.assertIn("All rows arrive", text)
        self.assertEqual(text.count("<tr data-writer="), 3)
        self.assertEqual(text.count("<polyline "), 3)
        self.assertIn(">1,234</td>", text)

    def test_names_of_peers_are_escaped(self) -> None:
        """HTML in names of peers is escaped."""
        self.all_live()
        self.observer.observe(PeerHeartbeat("<b>", "<i>", "<u>", "<s>", False, {}))
        self.observer.observe(DuplicateInstance("<b>", "<q>"))
        text = self.page()
        for tag in ("<w3>", "<b>", "<i>", "<u>", "<s>", "<q>"):
            self.assertNotIn(tag, text)
        self.assertIn("&lt;w3&gt;", text)

    def test_control_characters_are_escaped(self) -> None:
        """Control characters and changes of direction are escaped."""
        self.all_live()
        bad = "a\x1b[2J\0\u202eb"
        self.observer.observe(PeerHeartbeat(bad, bad, bad, bad, False, {}))
        self.observer.observe(DuplicateInstance(bad, bad))
        self.observer.observe(LinkUp(bad))
        text = self.page()
        for char in "\x1b\0\u202e":
            self.assertNotIn(char, text)
        self.assertIn(r"a\x1b[2J\x00\u202eb", text)

    def test_nothing_from_elsewhere(self) -> None:
        """The page loads no other file, and its policy forbids it."""
        response, text = self.get(status_page_resource(self.observer.snapshot))
        self.assertNotRegex(text, r"(src|href)=\"(?!data:|status\.json)")
        self.assertNotIn("http:", text)
        self.assertNotIn("https:", text)
        (policy,) = response.headers.getRawHeaders("Content-Security-Policy")
        self.assertIn("default-src 'none'", policy)
        nonces = set(re.findall(r"nonce=\"([^\"]+)\"", text))
        self.assertEqual(nonces, set(re.findall(r"'nonce-([^']+)'", policy)))
        self.assertEqual(len(nonces), 1)

    def test_body_only(self) -> None:
        """The script requests only the body of the page."""
        self.all_live()
        text = self.page("?part=body")
        self.assertNotIn("<html", text)
        self.assertNotIn("<script", text)
        self.assertIn("All rows arrive", text)

    def test_catching_up(self) -> None:
        """The row of a catch-up shows its progress."""
        self.all_live()
        event = CatchUpEvent("events", "w1", 1234, 2234)
        self.known.fetch(event)
        self.observer.observe(CatchUpPage(event, 100, 1334))
        text = self.page()
        self.assertIn("1 of 3 streams catching up", text)
        self.assertRegex(text, r"catching up,\s+100 of 1,000")

    def test_stalled(self) -> None:
        """A stall is shown first, with its start, its reason and a hint."""
        self.all_live()
        self.known.link_lost(why="gone")
        self.observer.observe(ConnectFailed("redis", "refused", 5.0))
        self.clock.advance(180)
        text = self.page()
        self.assertIn("3 of 3 streams stalled", text)
        self.assertEqual(text.count('<div class="alarm stall">'), 1)
        self.assertIn("stalled since 00:00:00 UTC (3 min)", text)
        self.assertIn("<strong>Why:</strong> redis: refused", text)
        self.assertIn("<strong>Do:</strong> Check that Redis", text)
        self.assertIn("<code>no_link</code>", text)

    def test_worst_first(self) -> None:
        """Writers with problems precede healthy ones in the table."""
        self.go_live(("events", "w1"), ("events", "w2"))
        self.known.fetch(CatchUpEvent("events", "w2", 1234, 2234))
        names = re.findall(r"data-writer=\"([^\"]+)\"", self.page())
        self.assertEqual(names, ["typing/&lt;w3&gt;", "events/w2", "events/w1"])

    def test_not_ready(self) -> None:
        """
        The page lists the conditions that are missing for readiness in one bounded
        line.
        """
        self.go_live(("events", "w1"))
        self.assertIn(
            "Not ready: events/w2 waiting for POSITION; typing/&lt;w3&gt; waiting for "
            "POSITION</p>",
            self.page(),
        )
        for number in range(10):
            self.observer.position_changed("receipts", f"w{number}", 1)
        text = self.page()
        self.assertEqual(text.count("Not ready: "), 1)
        self.assertIn("receipts/w1 waiting for POSITION; and 9 more</p>", text)

    def test_time(self) -> None:
        """The page shows the time at which it was rendered."""
        resource = status_page_resource(self.observer.snapshot)
        self.assertIn("as of 00:00:00 UTC", self.get(resource)[1])
        self.clock.advance(61)
        self.assertIn("as of 00:01:01 UTC", self.get(resource)[1])

    def test_title(self) -> None:
        """The title has the verdict, so that a tab in the background shows it."""
        self.all_live()
        text = self.page()
        title = "\u2714 All rows arrive: me"
        self.assertIn(f"<title>{title}</title>", text)
        self.assertIn(f'data-title="{title}"', self.page("?part=body"))

    def test_duplicate(self) -> None:
        """
        Two processes with the same instance name are reported with their locations.
        """
        self.all_live()
        self.observer.observe(DuplicateInstance("w1", "host:1 and host:2"))
        text = self.page()
        self.assertIn("Two processes have one name", text)
        self.assertIn("host:1 and host:2", text)

    def test_stuck_id(self) -> None:
        """A stuck id is reported with its session, and what to do about it."""
        self.all_live()
        stuck = StuckId("events", 7, "<w1>", 99.0, "session 12, idle", "End it.")
        self.known.connect(stuck_ids=lambda: [stuck])
        text = self.page()
        self.assertIn("An id is stuck", text)
        self.assertIn("id 7 of events, written by &lt;w1&gt;, is not finished", text)
        self.assertIn("session 12, idle", text)
        self.assertIn("End it.", text)

    def test_damage(self) -> None:
        """Damaged rows of the sink are reported, and the page is red."""
        self.all_live()
        self.known.connect(damage="/x/<journal> has 1 damaged line(s)")
        text = self.page()
        self.assertIn("✖ Stored rows are damaged", text)
        self.assertIn("/x/&lt;journal&gt; has 1 damaged", text)

    def test_single_instance(self) -> None:
        """An instance that reads from no writer and has no links has a page, too."""
        self.observer = StatusObserver("x.test", "me", monotonic=self.clock.seconds)
        self.assertIn("follows no other", self.page())

    def test_large_deployment(self) -> None:
        """
        With 200 peers and 40 writers of ten streams, the page is small and fast, and
        the problems come first: the worst writers, and the peers that are gone.
        """
        self.observer = make_large_deployment(self.clock)
        self.page()
        began = time.process_time()
        text = self.page()
        self.assertLess(time.process_time() - began, 0.1)
        self.assertLess(len(text.encode()), 200_000)
        rows = re.findall('data-writer="(.*)"', text)
        self.assertEqual(
            {name.partition("/")[2] for name in rows[:10]}, {"stream_writer33"}
        )
        self.assertEqual(rows[10], "events/stream_writer7")
        self.assertIn("typing: live (39)", text)
        gone = re.findall(r'class="first">(.*)</td>\n<td class="state bad">gone', text)
        self.assertEqual(
            gone, ["generic_worker150", "generic_worker151", "stream_writer33"]
        )
        self.assertIn("here (120)", text)


class OtherResourcesTests(PageMixin):
    def test_ready(self) -> None:
        """``/ready`` responds with 200, or with 503 and the missing conditions."""
        self.go_live(("events", "w1"), ("events", "w2"))
        resource = ready_resource(self.observer.snapshot)
        response, text = self.get(resource)
        self.assertEqual(response.code, 503)
        self.assertEqual(text, "typing/<w3> waiting for POSITION\n")
        self.all_live()
        response, text = self.get(resource)
        self.assertEqual((response.code, text), (200, "ready\n"))

    def test_json(self) -> None:
        """The JSON names conditions in words, and must not be cached."""
        response, text = self.get(status_json_resource(self.observer.snapshot))
        self.assertEqual(response.headers.getRawHeaders("Cache-Control"), ["no-store"])
        self.assertIn('"condition":"waiting for POSITION"', text)


class AssessmentTests(PageMixin):
    def test_order(self) -> None:
        """The most severe condition determines the verdict."""
        verdicts = []
        self.go_live(("events", "w1"), ("events", "w2"))
        verdicts.append(judge(self.observer.snapshot()))
        self.all_live()
        verdicts.append(judge(self.observer.snapshot()))
        self.clock.advance(60)
        self.known.announce("events", "w1", 9999)
        self.clock.advance(60)
        verdicts.append(judge(self.observer.snapshot()))
        self.observer.observe(DuplicateInstance("w1", ""))
        verdicts.append(judge(self.observer.snapshot()))
        self.assertEqual([v.tone for v in verdicts], ["busy", "good", "bad", "bad"])
        self.assertEqual(verdicts[2].text, "1 of 3 streams stalled")

    def test_short_loss_of_the_link(self) -> None:
        """A lost link is named as the reason only while writers wait for it."""
        self.all_live()
        self.observer.observe(LinkUp("old"))
        self.observer.observe(LinkDown("old", CloseReason.CLEAN, "gone"))
        self.clock.advance(30)
        self.assertEqual(judge(self.observer.snapshot()).text, "All rows arrive")
        self.known.link_lost(why="gone")
        self.clock.advance(3)
        verdict = judge(self.observer.snapshot())
        self.assertEqual(
            (verdict.tone, verdict.text),
            ("busy", "Waiting for 3 of 3 streams: redis has been down for 3 s"),
        )

    def test_no_link_and_only_writing(self) -> None:
        """
        After ten seconds without a link, an instance that only writes is reported as
        bad.
        """
        self.observer = StatusObserver("x.test", "me", monotonic=self.clock.seconds)
        self.observer.observe(ConnectFailed("redis", "refused", 1.0))
        text = judge(self.observer.snapshot()).text
        self.assertEqual(text, "Not ready: no link is up")
        self.clock.advance(10)
        verdict = judge(self.observer.snapshot())
        self.assertEqual((verdict.tone, verdict.text), ("bad", "No link is up"))

    def test_long_groups(self) -> None:
        """Many writers with the same problem are listed in one shortened line."""
        writers = [(f"s{number}", "w1") for number in range(9)]
        self.observer = StatusObserver(
            "x.test", "me", writers, monotonic=self.clock.seconds
        )
        self.known = KnownReaders(self.observer)
        self.clock.advance(10)
        (group,) = group_stalls(self.observer.snapshot().writers)
        self.assertEqual(group.names, "s0/w1, s1/w1, s2/w1, s3/w1 and 5 more")

    def test_every_reason_has_a_hint(self) -> None:
        """There is a hint for each reason of a stall."""
        self.assertEqual(set(HINTS), set(StallReason))

    def test_durations(self) -> None:
        """Durations are shown in one rounded unit."""
        texts = [duration(s) for s in (0.4, 119, 120, 7199, 7200, 200_000)]
        self.assertEqual(texts, ["0 s", "119 s", "2 min", "119 min", "2 h", "2 d"])

    def test_sparkline(self) -> None:
        """In the sparkline the greatest lag is at the top, and zero at the bottom."""
        self.assertEqual(sparkline([0, 50, 100]), "0.0,19.0 50.0,10.0 100.0,1.0")
        self.assertEqual(sparkline([0, 0]), "0.0,19.0 100.0,19.0")
