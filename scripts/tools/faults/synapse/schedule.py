"""The schedule of faults, derived from a seed without I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

#: The name of a round of several concurrent faults.
MIXED = "mixed"


@attrs.frozen
class Round:
    """One fault, or several that overlap.

    :ivar nemesis: the name to show.
    :ivar faults: the names of the faults to cause, in order.
    :ivar seed: the seed of all random choices in this round.
    """

    nemesis: str
    faults: tuple[str, ...]
    seed: int

    @property
    def chance(self) -> random.Random:
        """A new random generator, with the same sequence each time."""
        return random.Random(self.seed)


def make_schedule(
    seed: int, nemeses: Sequence[str], rounds: int, mixable: Sequence[str]
) -> list[Round]:
    """Return the rounds of a run, in order.

    :param nemeses: the names of faults, or :data:`MIXED`.
    :param rounds: the number of times that each of them is caused.
    :param mixable: the faults that may overlap others: two or three of them make
        a mixed round.
    """
    chance = random.Random(seed)
    schedule = []
    for _ in range(rounds):
        # Cause each fault once before repeating any, so that even an aborted run has
        # caused all about equally often.
        for nemesis in chance.sample(nemeses, len(nemeses)):
            faults: tuple[str, ...] = (nemesis,)
            if nemesis == MIXED:
                faults = tuple(chance.sample(mixable, chance.choice((2, 3))))
            schedule.append(Round(nemesis, faults, chance.getrandbits(32)))
    return schedule
