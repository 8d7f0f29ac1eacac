"""The wait between attempts: one policy for everything that is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

__all__ = ["Backoff"]

#: Beyond it a wait is past any maximum, and more would overflow.
_MOST_STEPS = 60


@attrs.frozen
class Backoff:
    """Waits that grow from one failure to the next, up to a maximum, with jitter.

    :ivar initial: the wait after the first failure, in s.
    :ivar maximum: the longest wait, in s.
    :ivar factor: by how much the wait grows from one failure to the next.
    :ivar jitter: returns a number in [0, 1) by which a wait is shortened, to half at
        most, so that clients which failed together do not come back together.
    """

    initial: float = 0.5
    maximum: float = 30.0
    factor: float = 2.0
    jitter: Callable[[], float] = random.random

    def delay(self, attempt: int) -> float:
        """Return the wait in s after the ``attempt``-th failure, from 1."""
        steps = min(attempt - 1, _MOST_STEPS)
        full = min(self.maximum, self.initial * self.factor**steps)
        return full * (1 - self.jitter() / 2)
