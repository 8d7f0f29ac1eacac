"""The delay between attempts: one policy for everything that is retried."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

__all__ = ["Backoff"]

#: The largest exponent: a delay reaches any maximum before it; more could overflow.
_MAX_EXPONENT = 60


@attrs.frozen
class Backoff:
    """Exponential backoff with a maximum and jitter.

    :ivar initial: the delay after the first failure, in s.
    :ivar maximum: the longest delay, in s.
    :ivar factor: the ratio of one delay to the one before it.
    :ivar jitter: returns a number in [0, 1), half of which is the fraction by which the
        delay is shortened, so that clients that failed together do not retry together.
    """

    initial: float = 0.5
    maximum: float = 30.0
    factor: float = 2.0
    jitter: Callable[[], float] = random.random

    def delay(self, attempt: int) -> float:
        """Return the delay in s after failure number ``attempt``, from 1."""
        exponent = min(attempt - 1, _MAX_EXPONENT)
        full = min(self.maximum, self.initial * self.factor**exponent)
        return full * (1 - self.jitter() / 2)
