"""Tests of the observer that does nothing."""

from __future__ import annotations

import inspect

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import CatchUp, ReplicationObserver


class ReplicationObserverTests(SynchronousTestCase):
    """The base of all observers."""

    def test_contexts(self) -> None:
        """What lasts is wrapped in a context, also when nobody looks."""
        observer = ReplicationObserver()
        with (
            observer.background_process("work"),
            observer.catch_up(CatchUp("s", "w", 1, 2)),
        ):
            pass

    def test_everything_else_returns_nothing(self) -> None:
        """Every other method may be told anything, and answers nothing."""
        observer = ReplicationObserver()
        for name, method in inspect.getmembers(observer, inspect.ismethod):
            if name not in ("background_process", "catch_up"):
                arguments = inspect.signature(method).parameters
                self.assertIsNone(method(*[None] * len(arguments)), name)
