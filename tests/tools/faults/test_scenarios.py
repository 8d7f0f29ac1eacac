"""Tests for :mod:`scripts.tools.faults.scenarios`."""

from __future__ import annotations

import os
import random
from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.deployment import FaultDeployment
from scripts.tools.faults.scenarios import SCENARIOS
from tests.support.link_proxy import Cut


class CallRecorder:
    """Records the calls made on it and its parts."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.postgres = self.redis = self.proxy = self
        self.processes: Any = self

    def __getitem__(self, name: str) -> CallRecorder:
        self.calls.append(name)
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> None:
            self.calls.append(" ".join([name, *map(str, arguments)]))

        return call


class NoPauses(random.Random):
    """A random source with which every pause is zero."""

    def uniform(self, a: float, b: float) -> float:
        return 0.0


class ScenariosTests(SynchronousTestCase):
    def calls(self, name: str) -> list[str]:
        calls: list[str] = []
        SCENARIOS[name].cause(cast(FaultDeployment, CallRecorder(calls)), NoPauses())
        return calls

    def test_each_fault_is_ended(self) -> None:
        """Each fault is caused where its name says, and ended."""
        for name, calls in {
            "main-killed": ["kill master", "restart master"],
            "reader-killed": ["kill reader1", "restart reader1"],
            "writer-frozen": ["event_writer1", "freeze", "thaw"],
            "redis-killed": ["kill", "start"],
            "redis-frozen": ["freeze", "thaw"],
            "postgres-killed": ["kill", "start"],
            "redis-frozen-long": ["freeze", "thaw"],
            "publishes-cut-long": [f"cut {Cut.PUBLISHES}", "heal"],
            "publishes-cut": [f"cut {Cut.PUBLISHES}", "heal"],
            "replies-cut": [f"cut {Cut.REPLIES}", "heal"],
            "subscription-cut": [f"cut {Cut.SUBSCRIPTION}", "heal"],
            "pings-cut-long": [f"cut {Cut.PINGS}", "heal"],
            "tcp-writer-killed": ["kill event_writer1", "restart event_writer1"],
            "tcp-reader-frozen-long": ["reader1", "freeze", "thaw"],
            "tcp-rows-cut": [f"cut {Cut.REPLIES}", "heal"],
            "tcp-pings-cut-long": [f"cut {Cut.PUBLISHES}", "heal"],
        }.items():
            self.assertEqual(self.calls(name), calls, name)

    def test_direct_tcp(self) -> None:
        """Exactly the scenarios named after direct TCP use it."""
        for name, scenario in SCENARIOS.items():
            needs = scenario.needs
            self.assertEqual(needs.direct_tcp, name.startswith("tcp-"), name)
            self.assertEqual(needs.extension, not name.startswith("classic-"), name)

    def test_full_disk_needs_root(self) -> None:
        """
        For an ordinary user, the scenario of a full disk is skipped with a reason.
        """
        self.patch(os, "geteuid", lambda: 1000)
        self.assertIn("root", SCENARIOS["disk-full"].why_skipped())
