"""Tests for the page of ``pipeline report`` in a real browser without a network.

Set ``SYNAPSE_REPLICATION_SCREENSHOTS`` to a folder to save screenshots.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.external import skip_reason
from tests.external.browser.browser import make_browser
from tests.pipeline.reports import make_report_data

skip = skip_reason("browser")

#: Returns elements wider than the page, except those that scroll by themselves.
_OVERFLOWING = """
return [...document.querySelectorAll('main *')]
    .filter(e => !e.closest('.scroll') && !e.closest('svg')
        && e.getBoundingClientRect().right > window.innerWidth + 1)
    .map(e => e.outerHTML.slice(0, 80));
"""

#: Each plot is in the page twice, for wide and narrow windows; only one is shown.
_SHOWN_PLOTS = """
return [...document.querySelectorAll('svg.plot')]
    .filter(svg => svg.getClientRects().length).map(svg => {
    const label = document.getElementById(svg.getAttribute('aria-labelledby'));
    const text = svg.querySelector('text');
    return [label.textContent, svg.getBoundingClientRect().height > 80,
        getComputedStyle(text).fill];
});
"""

#: Texts whose contrast with their background is less than 4.5, which WCAG requires.
_LOW_CONTRAST = """
const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const background = element => {
    for (let e = element; e; e = e.parentElement) {
        const [r, g, b, a] = numbers(getComputedStyle(e).backgroundColor);
        if (a === undefined || a > 0) return [r, g, b];
    }
    return [255, 255, 255];
};
const contrast = (element, colour) => {
    const [low, high] = [luminance(numbers(colour)), luminance(background(element))]
        .sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
};
return [...document.querySelectorAll('main *, header *')]
    .filter(e => e.getClientRects().length && [...e.childNodes].some(
        node => node.nodeType === Node.TEXT_NODE && node.textContent.trim()))
    .map(e => [e, e.closest('svg') ? getComputedStyle(e).fill
        : getComputedStyle(e).color])
    .filter(([e, colour]) => contrast(e, colour) < 4.5)
    .map(([e, colour]) => [colour, background(e).join(), e.outerHTML.slice(0, 80)]);
"""


class ReportPageTests(SynchronousTestCase):
    def open(self, mode: str, width: int) -> Any:
        from synapse_replication.pipeline.report.job import write_report

        folder = Path(self.mktemp()).absolute()
        write_report(make_report_data(), folder)
        browser = make_browser(mode, width)
        self.addCleanup(browser.quit)
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
        browser.get((folder / "report.html").as_uri())
        shots = os.environ.get("SYNAPSE_REPLICATION_SCREENSHOTS")
        if shots:
            browser.save_screenshot(str(Path(shots) / f"report-{mode}-{width}.png"))
        return browser

    def check(self, browser: Any, ink: str) -> None:
        """
        Check that six plots are drawn and named in the right colour, no text is cut off
        or faint, and the console is empty.
        """
        drawn = browser.execute_script(_SHOWN_PLOTS)
        self.assertEqual(len(drawn), 6)
        for name, is_high, fill in drawn:
            self.assertTrue(name)
            self.assertTrue(is_high, name)
            self.assertEqual(fill, ink, name)
        self.assertEqual(browser.execute_script(_OVERFLOWING), [])
        self.assertEqual(browser.execute_script(_LOW_CONTRAST), [])
        self.assertIn(
            "The audit found 1 error", browser.find_element("tag name", "body").text
        )
        self.assertEqual(browser.get_log("browser"), [])

    def test_light(self) -> None:
        """On a wide screen in light colours, everything is shown."""
        self.check(self.open("light", 1200), "rgb(92, 98, 109)")

    def test_dark_on_a_phone(self) -> None:
        """
        On a phone in dark colours, everything is shown without scrolling sideways.
        """
        self.check(self.open("dark", 390), "rgb(154, 162, 174)")
