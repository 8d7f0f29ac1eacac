"""The worlds that are explored."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.tools.explore.world import Bounds, Kind


def _bounds(
    ids: int,
    links: int,
    total: int,
    *,
    lies: int = 0,
    removals: int = 0,
    hellos: int = 0,
    stored: bool = False,
    burst: int | None = None,
) -> Bounds:
    """Return bounds with at most one fault of each kind, and ``total`` together."""
    return Bounds(
        ids=ids,
        links=links,
        breaks=1,
        losses=1,
        overflows=1,
        writer_crashes=1,
        reader_crashes=1,
        failures=1,
        lies=lies,
        removals=removals,
        hellos=hellos,
        stored=stored,
        total=total,
        burst=burst,
    )


#: The worlds that ``scripts/test`` explores.
SHALLOW: Mapping[str, tuple[Kind, Bounds]] = {
    "database, stored positions": (Kind.DATABASE, _bounds(1, 1, 1, stored=True)),
    "database, lie": (Kind.DATABASE, Bounds(ids=1, links=1, lies=1)),
    "standby, one id": (Kind.STANDBY, Bounds(ids=1, links=1)),
    "stock memory": (Kind.STOCK_MEMORY, _bounds(2, 1, 1)),
    "database, two links": (Kind.DATABASE, Bounds(ids=2, links=2)),
    "database": (Kind.DATABASE, _bounds(2, 1, 1, removals=1)),
    "database, lie, removed": (Kind.DATABASE, Bounds(ids=1, lies=1, removals=1)),
    "memory": (Kind.MEMORY, _bounds(2, 1, 1, hellos=1)),
    "memory, two links": (Kind.MEMORY, Bounds(ids=1, links=2)),
    "host memory": (Kind.HOST_MEMORY, _bounds(2, 1, 1)),
    "host memory, two links": (Kind.HOST_MEMORY, Bounds(ids=1, links=2)),
    "caches": (Kind.CACHES, _bounds(2, 1, 1)),
}

#: The worlds whose states a search without reductions must find, too. ``scripts/test``
#: explores the first two.
COMPARED: Mapping[str, tuple[Kind, Bounds]] = {
    "stock memory": SHALLOW["stock memory"],
    "memory": (
        Kind.MEMORY,
        Bounds(ids=1, losses=1, writer_crashes=1, reader_crashes=1, total=2),
    ),
    "database, two links": SHALLOW["database, two links"],
    "database": SHALLOW["database"],
}

#: The worlds that ``scripts/explore`` explores as well, about the smallest first.
DEEP: Mapping[str, tuple[Kind, Bounds]] = {
    "standby, lie": (Kind.STANDBY, Bounds(ids=1, links=1, lies=1)),
    "standby": (Kind.STANDBY, _bounds(2, 1, 1)),
    "standby, lie, all faults": (Kind.STANDBY, _bounds(1, 1, 1, lies=1)),
    "standby, two links": (Kind.STANDBY, Bounds(ids=1, links=2, breaks=1)),
    "stock memory, lie": (Kind.STOCK_MEMORY, _bounds(2, 1, 1, lies=1)),
    "stock memory, two links": (Kind.STOCK_MEMORY, _bounds(2, 2, 1)),
    "memory, two ids and links": (Kind.MEMORY, Bounds(ids=2, links=2)),
    "host memory, two ids and links": (Kind.HOST_MEMORY, Bounds(ids=2, links=2)),
    "stock memory, two faults": (Kind.STOCK_MEMORY, _bounds(2, 1, 2)),
    "host memory, two links": (Kind.HOST_MEMORY, _bounds(1, 2, 1)),
    "memory, two links": (Kind.MEMORY, _bounds(1, 2, 1, hellos=1)),
    "memory, two faults": (Kind.MEMORY, _bounds(2, 1, 2, hellos=1)),
    "memory, lie": (Kind.MEMORY, _bounds(2, 1, 1, lies=1)),
    "caches, two links": (Kind.CACHES, _bounds(1, 2, 1)),
    "caches, two faults": (Kind.CACHES, _bounds(2, 1, 2)),
    "database, three ids, two links": (Kind.DATABASE, Bounds(ids=3, links=2)),
    "database, three ids": (Kind.DATABASE, _bounds(3, 1, 1, removals=1)),
    "database, two links, two faults": (Kind.DATABASE, _bounds(1, 2, 2)),
    "database, two links": (Kind.DATABASE, _bounds(2, 2, 1)),
    "database, two ids, all faults": (Kind.DATABASE, _bounds(2, 1, 6)),
    "database, all faults and a lie": (Kind.DATABASE, _bounds(1, 1, 7, lies=1)),
    "database, two links, all faults": (Kind.DATABASE, _bounds(1, 2, 6)),
    "database, two faults": (
        Kind.DATABASE,
        _bounds(2, 1, 2, removals=1, stored=True),
    ),
    "database, lie": (Kind.DATABASE, _bounds(2, 1, 1, lies=1)),
    "claims, one id": (Kind.DATABASE, Bounds(ids=1, links=1, lies=1, burst=1)),
    "claims": (Kind.DATABASE, Bounds(ids=2, links=1, lies=1, burst=1)),
    "database, lie, two links": (Kind.DATABASE, _bounds(1, 2, 1, lies=1)),
    "claims, memory": (Kind.MEMORY, Bounds(ids=1, links=1, lies=1, burst=1)),
    "database, lie, three ids": (Kind.DATABASE, _bounds(3, 1, 1, lies=1)),
    "three ids, two links": (Kind.DATABASE, _bounds(3, 2, 1)),
    "database, three ids, all faults": (Kind.DATABASE, _bounds(3, 1, 6)),
    "memory, two links, two ids": (Kind.MEMORY, _bounds(2, 2, 1, hellos=1)),
}

#: The worlds with whose first states the driver of the package is compared.
DRIVEN: Mapping[str, tuple[Kind, Bounds]] = {
    **SHALLOW,
    "standby, lie": DEEP["standby, lie"],
    "claims, one id": DEEP["claims, one id"],
}

#: The worlds with which the driver is compared while items are delayed in its queue.
DELAYED: Mapping[str, tuple[Kind, Bounds]] = {
    "database": (Kind.DATABASE, _bounds(3, 1, 1)),
    "database, two links": (Kind.DATABASE, Bounds(ids=3, links=2, overflows=1)),
    "standby, lie": (Kind.STANDBY, Bounds(ids=3, overflows=1, lies=1)),
    "caches": (Kind.CACHES, _bounds(3, 1, 1)),
    "memory": (Kind.MEMORY, _bounds(3, 1, 1)),
    "host memory": (Kind.HOST_MEMORY, _bounds(3, 1, 1)),
    "stock memory": (Kind.STOCK_MEMORY, _bounds(3, 1, 1)),
}
