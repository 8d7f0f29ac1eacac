"""Tests for the page of a report, and for writing it."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.report import plots
from synapse_replication.pipeline.report.counts import ReportData
from synapse_replication.pipeline.report.job import render_page, write_report
from synapse_replication.pipeline.report.plots import draw_plots
from tests.pipeline.reports import BEGINNING, make_report_data, shared_plots


class _Checker(HTMLParser):
    """Collects the tags, addresses and ids of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def changed(row: SimpleNamespace, **values: Any) -> SimpleNamespace:
    """Return a row with other values."""
    return SimpleNamespace(**{**vars(row), **values})


class PageTests(SynchronousTestCase):
    def page(self, data: ReportData | None = None) -> str:
        return render_page(data or make_report_data(), shared_plots())

    def test_self_contained(self) -> None:
        """
        The page loads no resource and runs no script, and its policy forbids both.
        """
        checker = _Checker()
        page = self.page()
        checker.feed(page)
        self.assertEqual(
            [a for a in checker.addresses if a[:1] != "#" and a != "data:,"], []
        )
        self.assertNotIn("script", checker.tags)
        self.assertNotIn("@import", page)
        self.assertEqual(re.findall(r"url\((?!#)", page), [])
        self.assertIn("default-src 'none'", page)

    def test_accessible(self) -> None:
        """
        Each drawing has a label, ids are unique, and heading levels are consecutive.
        """
        checker = _Checker()
        page = self.page()
        checker.feed(page)
        self.assertEqual(len(checker.ids), len(set(checker.ids)))
        labels = re.findall(r'aria-labelledby="([^"]+)"', page)
        # Each of the six plots has a wide and a narrow version.
        self.assertEqual(len(labels), 12)
        self.assertLessEqual(set(labels), set(checker.ids))
        levels = [int(tag[1]) for tag in checker.tags if re.fullmatch(r"h\d", tag)]
        self.assertEqual(levels[0], 1)
        for before, after in itertools.pairwise(levels):
            self.assertLessEqual(after, before + 1)

    def test_escaped(self) -> None:
        """HTML and formulas in names are shown literally."""
        name = '<img src="x">&$\\frac'
        data = make_report_data()
        hostile = attrs.evolve(
            data,
            totals=[changed(t, stream=name, instance_name=name) for t in data.totals],
            over_time=[
                changed(c, stream=name, instance_name=name) for c in data.over_time
            ],
            # The other plots have the same legends.
            batches=[],
            arrived=[],
            lags_over_time=[],
            hottest=[SimpleNamespace(kind="room", name=name, rows=1)],
            findings=[
                attrs.evolve(f, message=name, stream=name) for f in data.findings or ()
            ],
        )
        page = render_page(hostile, draw_plots(hostile))
        self.assertFalse("<img" in page)
        self.assertTrue("&lt;img" in page)

    def test_names_differ_in_case(self) -> None:
        """Streams and writers whose names differ only in case are counted apart."""
        data = make_report_data()
        upper = [
            changed(t, stream=t.stream.upper(), instance_name=t.instance_name.upper())
            for t in data.totals
        ]
        page = self.page(attrs.evolve(data, totals=[*data.totals, *upper]))
        self.assertRegex(page, r"8 streams,\s+10 writers")

    def test_verdicts(self) -> None:
        """
        The verdict has the tone of the worst finding, or says that there was no audit.
        """
        data = make_report_data()
        for count, tone in (
            ({"error": 2, "warning": 1}, "bad"),
            ({"warning": 1}, "busy"),
            ({"info": 3}, "good"),
            ({}, "good"),
        ):
            page = self.page(attrs.evolve(data, finding_count=count))
            self.assertIn(f'<p class="verdict {tone}">The audit found', page)
        self.assertIn("Not audited", self.page(attrs.evolve(data, findings=None)))

    def test_empty(self) -> None:
        """A report without data is rendered, too."""
        page = render_page(ReportData(made=BEGINNING, sources=[], has_wire=True), [])
        self.assertIn("not measured", page)
        self.assertIn("No lag could be measured", page)

    def test_clock_difference(self) -> None:
        """
        If rows arrived before they were written, the page says that clocks differ.
        """
        data = make_report_data()
        self.assertNotIn("the clocks differ", self.page(data))
        wrong = [changed(lag, least=-3.0) for lag in data.lags]
        self.assertIn("the clocks differ", self.page(attrs.evolve(data, lags=wrong)))

    def test_durations(self) -> None:
        """Lags have three digits, or are rounded to an integer; no exponents."""
        data = make_report_data()
        for lag, text in (
            (0.25, "0.25 ms"),
            (999.7, "1,000 ms"),
            (1234, "1.23 s"),
            (86_400_000 * 1234.2, "1,234 d"),
        ):
            lags = [changed(each, p50=lag) for each in data.lags]
            self.assertIn(text, self.page(attrs.evolve(data, lags=lags)))

    def test_what_is_measured(self) -> None:
        """The page shows figures for rows, lags, events and findings."""
        page = self.page()
        for text in ("12,000", "event_persister1 announced 1848", "1.5 s", "catch-up"):
            self.assertIn(text, page)

    def test_what_to_do(self) -> None:
        """The page says what to do about each finding, and why notes may be many."""
        page = self.page()
        self.assertIn(
            'data-label="What to do" class="message">Restart the readers', page
        )
        self.assertIn("With <code>--archive</code>, an audit knows the replaced", page)
        self.assertIn("An audit with an archive has\nfewer", page)
        data = make_report_data()
        few = [note for note in data.notes if note.kind != "id_without_row"]
        self.assertNotIn("has\nfewer", self.page(attrs.evolve(data, notes=few)))

    def test_notes(self) -> None:
        """Errors are shown; notes are collapsed, in a group for each kind."""
        page = self.page()
        error = page.index("event_persister1 announced 1848")
        resets = page.index("stream reset:")
        gaps = re.search(r"id without row:\s+2,400 in 2 streams", page)
        assert gaps is not None
        self.assertLess(error, gaps.start())
        self.assertLess(gaps.start(), resets)
        self.assertEqual(page.count('<details class="notes">'), 2)
        self.assertNotIn("<details", page[page.index("<h2>Audit") : error])

    def test_cards(self) -> None:
        """Each cell has a label, because phones show the rows of tables as cards."""
        page = self.page()
        self.assertEqual(page.count("<td"), page.count("<td data-label="))
        for stream in re.findall(r'<td data-label="Stream">([^<]*)', page):
            self.assertRegex(stream, "^[a-z_]*$")


class WriteTests(SynchronousTestCase):
    def test_files(self) -> None:
        """The folder contains the page and one image per plot, and no other file."""
        folder = Path(self.mktemp()).absolute()
        self.patch(plots, "draw_plots", lambda data: shared_plots())
        write_report(make_report_data(), folder)
        names = sorted(path.name for path in folder.iterdir())
        self.assertEqual(len(names), 7)
        self.assertIn("report.html", names)
        self.assertEqual(list(folder.parent.glob(f".{folder.name}*")), [])
