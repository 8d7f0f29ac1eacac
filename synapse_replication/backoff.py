"""Exponential backoff: the delays between attempts."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import Struct

#: The largest exponent, to prevent an overflow. With the parameters that this package
#: uses, delays reach their maximum at a smaller one.
_MAX_EXPONENT = 60


class Backoff(Struct, frozen=True):
    """Exponential backoff with a maximum and jitter.

    :ivar initial: the delay after the first failure, without jitter, in s.
    :ivar maximum: the longest delay, in s.
    :ivar factor: the ratio of each delay to the previous one, without jitter, until
        the maximum is reached.
    :ivar jitter: returns a number in [0, 1). Half of it is the fraction by which a
        delay is shortened, so that clients that failed together do not retry together.
    """

    initial: float = 0.5
    maximum: float = 30.0
    factor: float = 2.0
    jitter: Callable[[], float] = random.random

    def delay(self, attempt: int) -> float:
        """Return the delay after a failure, in s.

        :param attempt: the number of failures so far; at least 1.
        """
        exponent = min(attempt - 1, _MAX_EXPONENT)
        full = min(self.maximum, self.initial * self.factor**exponent)
        return full * (1 - self.jitter() / 2)
