"""Tests of the observer that does nothing."""

from __future__ import annotations

import inspect

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import CatchUpEvent, ReplicationObserver


class ReplicationObserverTests(SynchronousTestCase):
    """The base of all observers."""

    def test_contexts(self) -> None:
        """The methods that span a duration return context managers."""
        observer = ReplicationObserver()
        with (
            observer.background_process("work"),
            observer.catch_up(CatchUpEvent("s", "w", 1, 2)),
            observer.requesting_rows("s", "w", {}),
            observer.serving_rows("s", {}),
            observer.position_write("s", "w", 2),
        ):
            pass

    def test_everything_else_returns_nothing(self) -> None:
        """Every other method accepts any arguments and returns ``None``."""
        observer = ReplicationObserver()
        for name, method in inspect.getmembers(observer, inspect.ismethod):
            signature = inspect.signature(method)
            if "ContextManager" not in str(signature.return_annotation):
                arguments = signature.parameters
                self.assertIsNone(method(*[None] * len(arguments)), name)
