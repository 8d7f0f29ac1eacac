"""Tests for :mod:`synapse_replication.pipeline.report.plots`."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

from matplotlib import image
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.report.counts import ReportData
from synapse_replication.pipeline.report.plots import (
    OTHERS,
    WIDE,
    draw_plots,
    draw_svg,
    drawings,
)
from tests.pipeline.reports import BEGINNING, shared_plots

START = int(BEGINNING.timestamp())


def report(**values: Any) -> ReportData:
    """Return the data of a report with these values."""
    return ReportData(made=BEGINNING, sources=[], **values)


def draw(**values: Any) -> dict[str, str]:
    """Draw the plots of a report for a wide page; return their SVGs by name."""
    found = drawings(report(**values))
    return {name: draw_svg(name, draw, WIDE)[0] for name, draw in found.items()}


def names(**values: Any) -> list[str]:
    """Return the names of the plots of a report, which are not drawn."""
    return list(drawings(report(**values)))


def texts(plot: str) -> list[str]:
    """Return the texts of a plot, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", plot)


def colours(plot: str) -> list[str]:
    """Return the distinct colours of the bars, in order."""
    return list(dict.fromkeys(colour for colour, _ in shapes(plot, "fill")))


def shapes(plot: str, drawn: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the colour and the points of each series of a plot, without the legend.

    :param drawn: ``fill`` for bars, ``stroke`` for lines.
    """
    found = re.findall(
        rf'<path d="([^"]+)" clip-path="[^"]+" style="[^"]*{drawn}: (var\(--s\d\))',
        plot,
    )
    return [(colour, points(path)) for path, colour in found]


def lines(plot: str) -> list[list[tuple[float, float]]]:
    """Return the points of each line."""
    return [line for _, line in shapes(plot, "stroke")]


def sizes(plot: str, axis: int) -> list[float]:
    """Return the width (axis 0) or the height (axis 1) of each bar."""
    found = []
    for _, corners in shapes(plot, "fill"):
        coordinates = [corner[axis] for corner in corners]
        found.append(max(coordinates) - min(coordinates))
    return found


def points(path: str) -> list[tuple[float, float]]:
    """Return the points of an SVG path."""
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def count(name: str, start: int = 0, rows: int = 1) -> SimpleNamespace:
    return SimpleNamespace(stream=name, instance_name=name, start=start, rows=rows)


def total(stream: str, writer: str, rows: int) -> SimpleNamespace:
    return SimpleNamespace(
        stream=stream,
        instance_name=writer,
        rows=rows,
        tokens=1,
        first_token=1,
        last_token=1,
        timed=0,
        first_ts=None,
        last_ts=None,
    )


def batch(bucket: int, largest: int, stream: str = "events") -> SimpleNamespace:
    return SimpleNamespace(
        stream=stream, bucket=bucket, tokens=5, p50=1, p99=1, largest=largest
    )


def lag(start: int | None, tokens: int = 2, **values: float) -> SimpleNamespace:
    given = {"p50": 1.0, "p95": 2.0, "p99": 3.0, "least": 1.0, **values}
    return SimpleNamespace(stream="events", start=start, tokens=tokens, **given)


class PlotTests(SynchronousTestCase):
    def test_all(self) -> None:
        """
        Each plot is drawn as an image, and as an SVG with the colours of the page.
        """
        plots = shared_plots()
        self.assertEqual(
            [plot.name for plot in plots],
            ["rows-over-time", "rows-by-writer", "shares", "batches", "arrived", "lag"],
        )
        for plot in plots:
            pixels = image.imread(io.BytesIO(plot.png), format="png")
            self.assertGreater(pixels.std(), 0.01, plot.name)
            self.assertTrue("var(--soft)" in plot.svg, plot.name)
            self.assertEqual(re.findall(r"#1b1d21|#fff", plot.svg), [])

    def test_many(self) -> None:
        """
        If there are too many streams, the first ones are shown, and the others are
        summed up.
        """
        counts = [
            SimpleNamespace(
                stream=f"stream{n}", instance_name=f"writer{n}", start=0, rows=100 - n
            )
            for n in range(40)
        ]
        (plot,) = draw(rows_window=60, arrived=counts).values()
        self.assertIn(">stream6<", plot)
        self.assertNotIn(">stream7<", plot)
        self.assertIn(">all others<", plot)

    def test_one_row(self) -> None:
        """A single row suffices for the plots."""
        total = SimpleNamespace(
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
        count = SimpleNamespace(stream="s", instance_name="w", start=0, rows=1)
        plots = draw(totals=[total], rows_window=1, over_time=[count])
        self.assertEqual(len(plots), 3)

    def test_for_page(self) -> None:
        """A drawing is one SVG element, reproducible, and labelled by its title."""
        data = report(totals=[total("events", "w1", 3)])
        (plot,) = draw_plots(data)
        self.assertTrue(plot.svg.startswith('<svg class="plot wide" role="img" '))
        self.assertIn('aria-labelledby="shares-title"', plot.svg)
        self.assertNotIn("<metadata", plot.svg)
        self.assertNotIn("<g id=", plot.svg)
        self.assertEqual(draw_plots(data), [plot])


class LeftOutTests(SynchronousTestCase):
    """Tests for omitting plots that would show nothing."""

    def test_nothing(self) -> None:
        """Without rows and recordings, no plot is drawn."""
        self.assertEqual(names(), [])

    def test_one_row_each(self) -> None:
        """If each token has one row, the sizes of batches are not drawn."""
        self.assertEqual(names(batches=[batch(1, largest=1)]), [])
        both = [batch(1, largest=1, stream="receipts"), batch(1, 2), batch(2, 2)]
        plots = draw(batches=both)
        self.assertEqual(list(plots), ["batches"])
        self.assertNotIn("receipts", texts(plots["batches"]))

    def test_one_token_each(self) -> None:
        """Percentiles are not drawn if each window has one token."""
        one, two = lag(60, tokens=1), lag(0)
        self.assertEqual(names(lags=[lag(None)], lags_over_time=[one]), [])
        self.assertEqual(names(lags=[lag(None)], lags_over_time=[two, one]), ["lag"])

    def test_no_times(self) -> None:
        """If no row has a time, only the shares are drawn."""
        self.assertEqual(names(totals=[total("push_rules", "w1", 2)]), ["shares"])


class OthersTests(SynchronousTestCase):
    """Tests for writers and streams that do not have their own colours."""

    def test_enough_colours(self) -> None:
        """Each of seven writers has its own colour, and there is no group of others."""
        totals = [total("events", f"w{n}", 10 - n) for n in range(7)]
        plot = draw(totals=totals)["shares"]
        self.assertNotIn(OTHERS, texts(plot))
        self.assertEqual(colours(plot), [f"var(--s{n})" for n in range(7)])

    def test_the_eighth(self) -> None:
        """
        If there are more writers, those with the fewest rows form a group, which is
        grey and last.
        """
        totals = [total("events", f"w{n}", 10 + n) for n in range(9)]
        plot = draw(totals=totals)["shares"]
        legend = [text for text in texts(plot) if re.match(r"w\d|all", text)]
        self.assertEqual(set(legend), {OTHERS, *(f"w{n}" for n in range(2, 9))})
        self.assertEqual(legend[-1], OTHERS)
        self.assertEqual(colours(plot), [f"var(--s{n})" for n in range(8)])

    def test_underscore(self) -> None:
        """The legend has a writer whose name begins with an underscore."""
        plots = draw_plots(report(totals=[total("events", "_w", 1)]))
        (shares,) = (plot for plot in plots if plot.name == "shares")
        self.assertEqual(
            [t for t in texts(shares.svg) if t.endswith("_w")], ["\u200b_w"]
        )
        self.assertEqual(self.flushWarnings(), [])

    def test_same_colour(self) -> None:
        """
        A stream has the same colour in each plot, even if a plot lacks other streams.
        """
        totals = [total("events", "w1", 9), total("receipts", "w2", 5)]
        counts = [count("receipts", start=START)]
        plots = draw(totals=totals, over_time=counts, arrived=counts)
        for name in ("rows-over-time", "arrived"):
            self.assertEqual(colours(plots[name]), ["var(--s1)"], name)

    def test_panels(self) -> None:
        """Each of the six streams with the most rows has a panel."""
        counts = [count(f"stream{n}", rows=n + 1) for n in range(8)]
        plot = draw(over_time=counts)["rows-by-writer"]
        titles = [text for text in texts(plot) if text.startswith("stream")]
        self.assertEqual(titles, [f"stream{n}" for n in (7, 6, 5, 4, 3, 2)])


class TextTests(SynchronousTestCase):
    """Tests for the labels of the axes."""

    def test_length_of_window(self) -> None:
        """The length of a window is shown in the longest unit."""
        for seconds, text in ((60, "1 min"), (5400, "1.5 h")):
            plot = draw(arrived=[count("events")], wire_window=seconds)["arrived"]
            self.assertIn(f"rows in {text}", texts(plot))

    def test_since_beginning(self) -> None:
        """If the recording has no date, times are relative to its beginning."""
        values = {
            "arrived": [count("events", start=n) for n in (0, 60, 119)],
            "wire_window": 1,
        }
        relative = texts(draw(**values, wire_relative=True)["arrived"])
        self.assertIn("+30 s", relative)
        self.assertIn("+1.5 min", relative)
        known = texts(draw(**values)["arrived"])
        self.assertEqual([text for text in known if text.startswith("+")], [])
        self.assertIn("1970-Jan-01 00:02", known)

    def test_utc(self) -> None:
        """Times are shown in UTC."""
        counts = [count("events", start=START + 900 * n) for n in range(8)]
        found = texts(draw(over_time=counts, rows_window=900)["rows-over-time"])
        self.assertIn("12:30", found)
        self.assertIn("2026-Jan-31", found)

    def test_sizes_of_batches(self) -> None:
        """Buckets, also empty ones, are labelled with their range of rows."""
        found = texts(draw(batches=[batch(1, 9), batch(8, 9)])["batches"])
        for label in ("1", "2-3", "4-7", "8-15"):
            self.assertIn(label, found)
        self.assertNotIn("16-31", found)

    def test_lags(self) -> None:
        """
        Lags are labelled in ms, s or min by their size, and each percentile is
        labelled.
        """
        lags = [lag(0, p50=20.0, p95=2000.0, p99=2e6), lag(60)]
        found = texts(draw(lags=[lag(None)], lags_over_time=lags)["lag"])
        for label in ("1 ms", "100 ms", "1 s", "10 s", "16.7 min"):
            self.assertIn(label, found)
        for percentile in ("p50", "p95", "p99"):
            self.assertEqual(found.count(percentile), 1)


class ValueTests(SynchronousTestCase):
    """Tests for the sizes of the drawn shapes."""

    def test_shares(self) -> None:
        """The shares of a stream's writers have the right proportions."""
        totals = [total("events", "w1", 3), total("events", "w2", 1)]
        plot = draw(totals=totals)["shares"]
        first, second = sizes(plot, axis=0)
        self.assertAlmostEqual(first / second, 3, places=2)

    def test_streams_add_up(self) -> None:
        """The rows of a stream's writers are summed in one bar."""
        counts = [
            SimpleNamespace(stream=stream, instance_name=writer, start=0, rows=rows)
            for stream, writer, rows in (
                ("events", "w1", 4),
                ("events", "w2", 2),
                ("caches", "w1", 2),
            )
        ]
        first, second = sizes(draw(arrived=counts)["arrived"], axis=1)
        self.assertAlmostEqual(first / second, 3, places=2)

    def test_windows_without_rows(self) -> None:
        """A line falls to zero in windows without rows."""
        counts = [count("events", start=60 * n, rows=5) for n in (0, 3)]
        (line,) = lines(draw(over_time=counts, rows_window=60)["rows-by-writer"])
        heights = [y for _, y in line]
        self.assertEqual(len(heights), 4)
        # The y axis of SVG points downwards.
        self.assertEqual(heights[0], heights[3])
        self.assertEqual(heights[1], heights[2])
        self.assertGreater(heights[1], heights[0])

    def test_negative_lag(self) -> None:
        """A negative lag, which differing clocks cause, is drawn as zero."""
        below = [lag(60 * n, p50=-50.0, p95=0.0, p99=8.0) for n in range(2)]
        plot = draw(lags=[lag(None)], lags_over_time=below)["lag"]
        p99, p95, p50 = lines(plot)
        self.assertEqual(p50, p95)
        self.assertNotEqual(p50, p99)

    def test_lags_in_order(self) -> None:
        """
        Windows are drawn in the order of time, whatever their order in the data is.
        """
        mixed = [lag(start) for start in (120, 0, 60)]
        for line in lines(draw(lags=[lag(None)], lags_over_time=mixed)["lag"]):
            self.assertEqual(line, sorted(line))
