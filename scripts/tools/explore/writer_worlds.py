"""The worlds of a writer that are explored."""

from __future__ import annotations

from scripts.tools.explore.writer_world import Bounds

#: The worlds that ``scripts/test`` explores.
SHALLOW: dict[str, Bounds] = {
    "lost answer": Bounds(breaks=1),
    "lost answer, failure": Bounds(breaks=1, failures=1),
    "frozen and replaced": Bounds(blocks=((1,), (1,)), freezes=1, severs=1),
    "failover": Bounds(failovers=1),
    "old snapshot": Bounds(blocks=((1, 1), ()), snapshots=1),
    "other writer": Bounds(blocks=((1, 1), ()), others=1),
    "sequence set back": Bounds(blocks=((1, 1), ()), set_backs=1),
}

_TWO = ((2,), (1,))

#: The worlds that ``scripts/explore`` explores as well, about the smallest first.
DEEP: dict[str, Bounds] = {
    "frozen and replaced, three ids": Bounds(blocks=_TWO, freezes=1, severs=1),
    "lost answer, replaced": Bounds(blocks=_TWO, breaks=1, severs=1, failures=1),
    "lost answer, failover": Bounds(blocks=_TWO, breaks=1, failovers=1),
    "two transactions": Bounds(blocks=((2, 1), ()), breaks=1, snapshots=1, others=1),
    "other writer, replaced": Bounds(
        blocks=((1,), (1,)), freezes=1, severs=1, others=1
    ),
    "all faults of a writer": Bounds(
        blocks=_TWO, freezes=1, breaks=1, failovers=1, snapshots=1
    ),
}
