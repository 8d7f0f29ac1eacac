"""Audits more simulated deployments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tests.external import skip_reason
from tests.pipeline.audit import test_simulated

skip = skip_reason("long")


class SimulatedTests(test_simulated.SimulatedTests):
    """Tests with other seeds."""

    seeds: ClassVar[Sequence[int]] = range(8, 38)
