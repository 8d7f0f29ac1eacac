"""Tests for the status page in a real browser: Debian's ``chromium``.

Set ``SYNAPSE_REPLICATION_SCREENSHOTS`` to a folder to save screenshots.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from prometheus_client import CollectorRegistry
from twisted.internet import reactor as _reactor  # noqa: TID251
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.internet.threads import blockingCallFromThread, deferToThread
from twisted.trial.unittest import TestCase

from synapse_replication.app.http_limits import BoundedSite, served_hosts
from synapse_replication.app.http_site import make_root
from synapse_replication.app.status_page import MOST_SHOWN
from synapse_replication.handlers.events import CatchUpEvent, CatchUpPage, PeerHeartbeat
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from tests.external import skip_reason
from tests.external.browser.browser import PATIENCE, make_browser, wait_until
from tests.support.known_readers import KnownReaders
from tests.support.large_deployment import make_large_deployment

skip = skip_reason("browser")

reactor: Any = _reactor


class StatusPageTests(TestCase):
    timeout = 120

    def setUp(self) -> None:
        self.clock = Clock()
        self.observer = StatusObserver(
            "example.com",
            "generic_worker1",
            [("events", "event_persister1"), ("typing", "stream_writer1")],
            monotonic=self.clock.seconds,
        )
        self.known = KnownReaders(self.observer)
        self.known.link_up()
        for key in (("events", "event_persister1"), ("typing", "stream_writer1")):
            self.known.go_live(*key, 1000)
        self.heartbeat()
        site = BoundedSite(
            make_root(
                frozenset({"metrics"}),
                CollectorRegistry(),
                lambda: self.observer.snapshot(),
            ),
            served_hosts(["127.0.0.1"], []),
            guarded=None,
            max_connections=100,
            refused=lambda status, why: None,
        )
        self.port = reactor.listenTCP(0, site, interface="127.0.0.1")

    def tearDown(self) -> Any:
        return self.port.stopListening()

    def heartbeat(self) -> None:
        for name in ("event_persister1", "stream_writer1"):
            self.observer.observe(
                PeerHeartbeat(name, "Vn3xk2", "0.1.0", "host7:4711", False, {})
            )

    def in_browser(
        self, mode: str, width: int, steps: Callable[[Any], None]
    ) -> Deferred[None]:
        """Run ``steps`` in a thread with the page open; the console must stay empty."""

        def run() -> None:
            browser: Any = make_browser(mode, width)
            try:
                browser.get(f"http://127.0.0.1:{self.port.getHost().port}/status")
                steps(browser)
                self.assertEqual(browser.get_log("browser"), [])
            finally:
                browser.quit()

        return deferToThread(run)

    def call_in_reactor(self, func: Callable[[], object]) -> None:
        """Call a function in the reactor's thread from the browser's thread."""
        blockingCallFromThread(reactor, func)

    def wait_for_text(self, browser: Any, text: str) -> None:
        """Wait until the page shows a text without being reloaded."""
        wait_until(
            browser, lambda seen: text in seen.find_element("tag name", "body").text
        )

    def wait_for_title(self, browser: Any, text: str) -> None:
        """Wait until the title of the tab is ``text``."""
        wait_until(browser, lambda seen: seen.title == text)

    def check_width(self, browser: Any) -> None:
        """Check that the page does not scroll sideways."""
        # A phone zooms out if an element is too wide, which increases innerWidth.
        page = "const page = document.documentElement; "
        wide = browser.execute_script(
            page + "return [page.scrollWidth, page.clientWidth]"
        )
        self.assertEqual(wide[0], wide[1], "the page scrolls sideways")

    def save_screenshot(self, browser: Any, name: str) -> None:
        """Save a screenshot if the environment variable is set."""
        folder = os.environ.get("SYNAPSE_REPLICATION_SCREENSHOTS")
        if folder:
            browser.save_screenshot(str(Path(folder) / f"{name}.png"))

    def flow(self) -> None:
        """Let rows arrive for some minutes, followed by a catch-up."""
        for step in range(30):
            self.clock.advance(5)
            self.heartbeat()
            position = 1000 + step * 1000
            self.known.announce(
                "events", "event_persister1", position + 400 * (step % 7)
            )
            self.observer.sample()
            self.observer.position_changed("events", "event_persister1", position)
        event = CatchUpEvent("events", "event_persister1", 30_000, 128_211)
        self.known.fetch(event)
        self.observer.observe(CatchUpPage(event, 12_034, 42_034))

    def stop_writer(self) -> None:
        self.known.finish("events", "event_persister1", 128_211)
        message = PeerHeartbeat(
            "stream_writer1", "Vn3xk2", "0.1.0", "host7:4711", True, {}
        )
        self.observer.observe(message)
        self.clock.advance(12)

    def watch(self, name: str) -> Callable[[Any], None]:
        def steps(browser: Any) -> None:
            browser.execute_script("window.notLoadedAgain = true")
            self.wait_for_text(browser, "All rows arrive")
            self.wait_for_text(browser, "1,000")
            self.call_in_reactor(self.flow)
            self.wait_for_text(browser, "42,034")
            self.wait_for_text(browser, "12,034 of 98,211")
            self.save_screenshot(browser, f"{name}-catching-up")
            self.call_in_reactor(self.stop_writer)
            self.wait_for_text(browser, "1 of 2 streams stalled")
            self.wait_for_text(browser, "stream_writer1 announced its exit")
            self.save_screenshot(browser, f"{name}-stalled")
            self.assertTrue(browser.execute_script("return window.notLoadedAgain"))
            self.check_width(browser)

        return steps

    def background(self, browser: Any) -> str:
        script = "return getComputedStyle(document.body).backgroundColor"
        colour: str = browser.execute_script(script)
        return colour

    def test_light(self) -> Deferred[None]:
        """Values change while rows arrive, and a stopped writer is shown as stalled."""
        return self.in_browser("light", 1200, self.watch("light"))

    def test_dark_on_a_phone(self) -> Deferred[None]:
        """The page follows the preference for dark colours and fits a phone's width."""

        def steps(browser: Any) -> None:
            self.assertEqual(self.background(browser), "rgb(21, 23, 27)")
            self.watch("dark-phone")(browser)

        return self.in_browser("dark", 390, steps)

    def test_many_streams_on_a_phone(self) -> Deferred[None]:
        """With hundreds of streams with long names, the first one is visible."""

        def add_many_streams() -> None:
            for number in range(300):
                stream = f"a_stream_with_a_rather_long_name_{number % 30}"
                writer = f"a_process_with_a_rather_long_name_{number // 30}"
                self.observer.position_changed(stream, writer, 10**12)

        def steps(browser: Any) -> None:
            self.call_in_reactor(add_many_streams)
            self.wait_for_text(browser, "Waiting for 300 of 302 streams")
            self.save_screenshot(browser, "many-streams")
            self.check_width(browser)
            place = "document.querySelector('tbody tr').getBoundingClientRect()"
            row = browser.execute_script(f"return {place}.bottom")
            self.assertLess(row, 900)

        return self.in_browser("light", 390, steps)

    def test_two_hundred_processes(self) -> Deferred[None]:
        """With 40 writers of ten streams among 200 peers, the problems come first.

        The screenshot is ``docs/images/status-page-large.png``. To make it again:
        ``SYNAPSE_REPLICATION_SCREENSHOTS=docs/images tox -e browser --
        tests.external.browser.test_status_page.StatusPageTests.test_two_hundred_processes``
        """

        def grow() -> None:
            self.observer = make_large_deployment(self.clock)

        def steps(browser: Any) -> None:
            self.call_in_reactor(grow)
            self.wait_for_text(browser, "10 of 400 streams stalled")
            self.save_screenshot(browser, "status-page-large")
            self.check_width(browser)
            rows = browser.find_elements("css selector", "tr[data-writer]")
            self.assertEqual(len(rows), MOST_SHOWN)
            self.assertEqual(
                rows[10].get_attribute("data-writer"), "events/stream_writer7"
            )
            self.assertIn("here (120)", browser.find_element("tag name", "body").text)

        return self.in_browser("light", 1000, steps)

    def test_process_gone(self) -> Deferred[None]:
        """If its process has ended, the page states that the status is out of date."""

        def steps(browser: Any) -> None:
            self.wait_for_text(browser, "All rows arrive")
            self.call_in_reactor(self.port.stopListening)
            # Open connections would still be served.
            browser.execute_cdp_cmd("Network.enable", {})
            browser.execute_cdp_cmd(
                "Network.emulateNetworkConditions",
                {
                    "offline": True,
                    "latency": 0,
                    "downloadThroughput": -1,
                    "uploadThroughput": -1,
                },
            )
            self.wait_for_text(browser, "the status below is out of date")
            self.wait_for_title(browser, "\u2716 No answer: generic_worker1")
            browser.get_log("browser")

        return self.in_browser("light", 1200, steps)

    def test_process_hangs(self) -> Deferred[None]:
        """While its process hangs, the page states that the status is out of date."""

        def steps(browser: Any) -> None:
            self.wait_for_text(browser, "All rows arrive")
            is_enough = Event()
            reactor.callFromThread(is_enough.wait, 2 * PATIENCE)
            try:
                self.wait_for_text(browser, "the status below is out of date")
                self.assertFalse(is_enough.is_set())
            finally:
                is_enough.set()
            self.wait_for_title(browser, "\u2714 All rows arrive: generic_worker1")

        return self.in_browser("light", 1200, steps)

    def test_in_the_background(self) -> Deferred[None]:
        """The title of a tab in the background is updated."""

        def steps(browser: Any) -> None:
            self.wait_for_title(browser, "\u2714 All rows arrive: generic_worker1")
            hide = "Object.defineProperty(document, 'hidden', {get: () => true})"
            browser.execute_script(hide)
            self.call_in_reactor(self.stop_writer)
            self.wait_for_title(
                browser, "\u2716 1 of 2 streams stalled: generic_worker1"
            )

        return self.in_browser("light", 1200, steps)

    def test_selection_pauses_updates(self) -> Deferred[None]:
        """While text is selected the page is not updated, but its title is."""

        def steps(browser: Any) -> None:
            self.wait_for_text(browser, "All rows arrive")
            select = "getSelection().selectAllChildren(document.querySelector('h1'))"
            browser.execute_script(select)
            self.call_in_reactor(self.stop_writer)
            self.wait_for_title(
                browser, "\u2716 1 of 2 streams stalled: generic_worker1"
            )
            chosen = browser.execute_script("return getSelection().toString()")
            self.assertEqual(chosen, "generic_worker1 of example.com")
            browser.execute_script("getSelection().removeAllRanges()")
            self.wait_for_text(browser, "1 of 2 streams stalled")

        return self.in_browser("light", 1200, steps)
