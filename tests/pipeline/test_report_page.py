"""Tests for the values, plots and page of a report: all but Spark."""

from __future__ import annotations

import datetime
import functools
import io
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import attrs
from matplotlib import image
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.jobs.report import write_report
from synapse_replication.pipeline.report_data import (
    Hot,
    ReportData,
    WindowCount,
    WriterTotal,
)
from synapse_replication.pipeline.report_page import judge, render_page
from synapse_replication.pipeline.report_plots import Plot, draw_plots
from tests.pipeline.reports import BEGINNING, make_report_data

UTC = datetime.timezone.utc


@functools.cache
def shared_plots() -> list[Plot]:
    """Draw them once: that takes a second or two."""
    return draw_plots(make_report_data())


class _Checker(HTMLParser):
    """Collects what a page consists of."""

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


class PlotTests(SynchronousTestCase):
    def test_all(self) -> None:
        """Each plot is drawn as an image, and as a drawing in the colours of the page."""
        plots = shared_plots()
        self.assertEqual(
            [plot.name for plot in plots],
            ["rows-over-time", "rows-by-writer", "shares", "batches", "arrived", "lag"],
        )
        for plot in plots:
            pixels = image.imread(io.BytesIO(plot.png), format="png")
            self.assertGreater(pixels.std(), 0.01, plot.name)
            self.assertTrue("var(--soft)" in plot.svg, plot.name)
            self.assertEqual(re.findall(r"#0100\w\w|#1b1d21", plot.svg), [])

    def test_many(self) -> None:
        """Of many streams and writers the first ones are shown, the rest as one."""
        counts = [
            WindowCount(
                stream=f"stream{n}", instance_name=f"writer{n}", start=0, rows=100 - n
            )
            for n in range(40)
        ]
        plots = draw_plots(
            ReportData(made=BEGINNING, sources=[], rows_window=60, arrived=counts)
        )
        (plot,) = plots
        self.assertIn(">stream6<", plot.svg)
        self.assertNotIn(">stream7<", plot.svg)
        self.assertIn(">all others<", plot.svg)

    def test_one_row(self) -> None:
        """One row is enough to draw."""
        total = WriterTotal(
            stream="s",
            instance_name="w",
            rows=1,
            tokens=1,
            first_token=1,
            last_token=1,
            timed=1,
            first_ts=BEGINNING,
            last_ts=BEGINNING,
        )
        count = WindowCount(stream="s", instance_name="w", start=0, rows=1)
        plots = draw_plots(
            ReportData(
                made=BEGINNING,
                sources=[],
                totals=[total],
                rows_window=1,
                over_time=[count],
            )
        )
        self.assertEqual(len(plots), 3)


class PageTests(SynchronousTestCase):
    def page(self, data: ReportData | None = None) -> str:
        return render_page(data or make_report_data(), shared_plots())

    def test_self_contained(self) -> None:
        """The page loads nothing from anywhere, runs nothing, and says so itself."""
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
        """Each drawing has a name, each id is there once, headings follow in order."""
        checker = _Checker()
        page = self.page()
        checker.feed(page)
        self.assertEqual(len(checker.ids), len(set(checker.ids)))
        labels = re.findall(r'aria-labelledby="([^"]+)"', page)
        self.assertEqual(len(labels), 6)
        self.assertLessEqual(set(labels), set(checker.ids))
        levels = [int(tag[1]) for tag in checker.tags if re.fullmatch(r"h\d", tag)]
        self.assertEqual(levels[0], 1)
        for before, after in itertools.pairwise(levels):
            self.assertLessEqual(after, before + 1)

    def test_escaped(self) -> None:
        """Names that look like HTML or like formulas are shown as they are."""
        name = '<img src="x">&$\\frac'
        data = make_report_data()
        hostile = attrs.evolve(
            data,
            totals=[
                attrs.evolve(t, stream=name, instance_name=name) for t in data.totals
            ],
            over_time=[
                attrs.evolve(c, stream=name, instance_name=name) for c in data.over_time
            ],
            hottest=[Hot(kind="room", name=name, rows=1)],
            findings=[
                attrs.evolve(f, message=name, stream=name) for f in data.findings or ()
            ],
        )
        page = render_page(hostile, draw_plots(hostile))
        self.assertFalse("<img" in page)
        self.assertTrue("&lt;img" in page)

    def test_verdicts(self) -> None:
        """What an audit found comes first; that there was none is said, too."""
        data = make_report_data()
        for count, tone in (
            ({"error": 2, "warning": 1}, "bad"),
            ({"warning": 1}, "busy"),
            ({"info": 3}, "good"),
            ({}, "good"),
        ):
            verdict = judge(attrs.evolve(data, finding_count=count))
            self.assertEqual(verdict.tone, tone)
        self.assertIn("Not audited", judge(attrs.evolve(data, findings=None)).text)

    def test_empty(self) -> None:
        """A report of nothing is a page, too."""
        page = render_page(ReportData(made=BEGINNING, sources=[], has_wire=True), [])
        self.assertIn("not measured", page)
        self.assertIn("Nothing could be measured", page)

    def test_clock_difference(self) -> None:
        """Rows that arrived before they were written are pointed out."""
        data = make_report_data()
        self.assertNotIn("the clocks differ", self.page(data))
        wrong = [attrs.evolve(lag, least=-3.0) for lag in data.lags]
        self.assertIn("the clocks differ", self.page(attrs.evolve(data, lags=wrong)))

    def test_what_is_measured(self) -> None:
        """The numbers are there: rows, lags, events, findings."""
        page = self.page()
        for text in ("12,000", "event_persister1 announced 1848", "1.5 s", "catch-up"):
            self.assertIn(text, page)


class WriteTests(SynchronousTestCase):
    def test_files(self) -> None:
        """The folder has the page and an image of each plot, and nothing else."""
        folder = Path(self.mktemp()).absolute()
        write_report(make_report_data(), folder)
        names = sorted(path.name for path in folder.iterdir())
        self.assertEqual(len(names), 7)
        self.assertIn("report.html", names)
        self.assertEqual(list(folder.parent.glob(f".{folder.name}*")), [])
