"""Tests for comparing the outcomes of tests on both sides."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.matrix.run import summarize
from scripts.tools.synapse_suite.report import show
from scripts.tools.synapse_suite.run import Comparison, ModuleRun


def compare(stock: Mapping[str, str], ours: Mapping[str, str]) -> Comparison:
    """Return a comparison of outcomes."""
    return Comparison(
        "tests.a",
        ModuleRun(stock, 1.0, Path("stock.log")),
        ModuleRun(ours, 2.0, Path("ours.log")),
    )


class ComparisonTests(SynchronousTestCase):
    """Tests for Comparison and show."""

    def test_good(self) -> None:
        """A test that does not pass on stock need not pass on ours."""
        stock = {"a": "success", "b": "failure", "c": "skip"}
        result = compare(stock, {"a": "success", "b": "error"})
        self.assertTrue(result.is_good)
        output = io.StringIO()
        show(Console(file=output), "1.2.3", [result])
        self.assertEqual(
            summarize(output.getvalue()), ("stock 1, ours 1, lost 0", True)
        )

    def test_lost(self) -> None:
        """
        A test that passes on stock, but fails, is skipped or does not run on ours, is
        lost.
        """
        stock = {"a": "success", "b": "success", "c": "success", "d": "success"}
        ours = {"a": "success", "b": "skip", "c": "error", "e": "success"}
        result = compare(stock, ours)
        self.assertEqual(result.lost, ["b", "c", "d"])
        self.assertFalse(result.is_good)
        output = io.StringIO()
        show(Console(file=output, width=200), "1.2.3", [result])
        text = output.getvalue()
        for line in ("lost: b (skip;", "lost: c (error;", "lost: d (not finished;"):
            self.assertIn(line, text)
        self.assertEqual(summarize(text), ("stock 4, ours 2, lost 3", False))

    def test_nothing_ran(self) -> None:
        """Without a success on stock the comparison proves nothing."""
        self.assertFalse(compare({}, {}).is_good)
