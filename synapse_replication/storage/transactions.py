"""Interfaces for running transactions: of this package's pool, or a host's.

They are apart from :mod:`synapse_replication.storage.database`, which a process of a
homeserver does not load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from twisted.internet.defer import Deferred

T = TypeVar("T")


class TransactionRunner(Protocol):
    """Interface for running transactions: a ``Database``, or a host's adapter."""

    def transact(
        self,
        description: str,
        func: Callable[[Any], T],
        *,
        autocommit: bool = False,
    ) -> Deferred[T]:
        """Run ``func(cursor)`` in a transaction; see ``Database.transact``."""
        ...


@runtime_checkable
class SettlingRunner(Protocol):
    """Additional interface of a runner whose transactions can outlive its results.

    A transaction whose result was cancelled, or whose connection was lost, may still
    commit. Without this interface, its ids are released at once.
    """

    def settled(self) -> Deferred[None]:
        """Return a Deferred that fires when the transactions open now have ended."""
        ...
