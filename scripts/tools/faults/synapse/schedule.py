"""Which fault is caused when: pure and seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

__all__ = ["MIXED", "Round", "make_schedule"]

#: The fault that consists of several at once.
MIXED = "mixed"


@attrs.frozen
class Round:
    """One fault, or several that overlap, and what it leaves to chance.

    :ivar nemesis: the name to show.
    :ivar faults: the names of the faults to cause, in order.
    :ivar seed: of all that is left to chance in this round.
    """

    nemesis: str
    faults: tuple[str, ...]
    seed: int

    @property
    def chance(self) -> random.Random:
        """A new source of chance, the same each time."""
        return random.Random(self.seed)


def make_schedule(
    seed: int, nemeses: Sequence[str], rounds: int, mixable: Sequence[str]
) -> list[Round]:
    """Return the rounds of a run, in the order in which they are done.

    :param nemeses: the names of faults, or :data:`MIXED`.
    :param rounds: how often each of them is caused.
    :param mixable: the faults that may overlap others: two or three of them make
        a mixed round.
    """
    chance = random.Random(seed)
    schedule = []
    for _ in range(rounds):
        # All of them once, then all of them again: a run that is cut short has
        # seen each about as often.
        for nemesis in chance.sample(nemeses, len(nemeses)):
            faults: tuple[str, ...] = (nemesis,)
            if nemesis == MIXED:
                faults = tuple(chance.sample(mixable, chance.choice((2, 3))))
            schedule.append(Round(nemesis, faults, chance.getrandbits(32)))
    return schedule
