"""The interface for running transactions: of this package's pool, or a host's.

It is apart from :mod:`synapse_replication.storage.database`, which a process of a
homeserver does not load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import Deferred

T = TypeVar("T")


class TransactionRunner(Protocol):
    """Interface for running transactions: a ``Database``, or a host's adapter.

    A transaction whose result was cancelled, or whose connection was lost, may still
    commit. Its ids are released at once, unless the runner has a method ``settled``
    like that of ``Database``.
    """

    def transact(
        self,
        description: str,
        func: Callable[[Any], T],
        *,
        autocommit: bool = False,
    ) -> Deferred[T]:
        """Run ``func(cursor)`` in a transaction; see ``Database.transact``."""
        ...
