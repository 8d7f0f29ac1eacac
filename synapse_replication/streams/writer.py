"""A writer's knowledge of its transactions: only the database settles an id.

Theory of operation: a process that sent COMMIT and received no answer does not know
whether its rows are committed; PostgreSQL may complete the commit seconds or hours
later, for instance when a synchronous standby returns. If the process took the broken
connection for a failure, it would declare ids without a row that receive one later, and
no reader would fetch that row. So an id is settled only if the commit was acknowledged,
the rollback was acknowledged, or the database has shown that the transaction has ended.

:class:`TransactionOutcome` follows one transaction through
:data:`~synapse_replication.streams.writer_table.TRANSACTION`. Its driver
(:class:`~synapse_replication.storage.database.Database`) reports events and takes the
effects that are returned. :func:`read_evidence` decides what an answer of the database
proves. This module has no clock, no I/O and no awaitable; ``scripts/explore`` runs it
in every interleaving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from synapse_replication.streams.writer_table import (
    SETTLED,
    TRANSACTION,
    Effect,
    TransactionEvent,
    TransactionState,
)

#: The table by names: a member of an Enum has a slow hash.
STEPS: Final = {
    (state._name_, event._name_): step for (state, event), step in TRANSACTION.items()
}


class UnexpectedWriterEventError(Exception):
    """An event happened that the table does not expect: a defect of this package."""


@attrs.define
class TransactionOutcome:
    """The outcome of one transaction, as far as it is known."""

    state: TransactionState = TransactionState.RUNNING

    @property
    def is_settled(self) -> bool:
        """Whether the transaction is known to have ended."""
        return self.state in SETTLED

    def handle(self, event: TransactionEvent) -> Sequence[Effect]:
        """Record an event.

        :return: the effects that the driver takes, in order.
        :raises UnexpectedWriterEventError: if the state does not expect the event.
        """
        step = STEPS.get((self.state._name_, event._name_))
        if step is None:
            raise UnexpectedWriterEventError(f"{event.value} while {self.state.value}")
        self.state = step.state
        return step.effects


@attrs.frozen
class Evidence:
    """The database's answer about a transaction whose own answer was lost.

    :ivar is_standby: whether the server that answered is a standby, which knows nothing
        about sessions of its primary.
    :ivar is_same_history: whether it has the history in which the transaction ran:
        after a failover, its number may be that of another transaction.
    :ivar status: the status that PostgreSQL stores for the transaction's number:
        ``in progress``, ``committed`` or ``aborted``; ``None`` if the number is
        unknown, or too old.
    :ivar session: the state of its session; ``None`` if the session has ended.
    """

    is_standby: bool
    is_same_history: bool
    status: str | None
    session: str | None


_BY_STATUS: Final = {
    "committed": TransactionEvent.FOUND_COMMITTED,
    "aborted": TransactionEvent.FOUND_ROLLED_BACK,
}


def read_evidence(evidence: Evidence) -> TransactionEvent:
    """Return what the evidence proves."""
    if evidence.is_standby:
        return TransactionEvent.NOT_FOUND_OUT
    if not evidence.is_same_history:
        # The sessions of the former primary have ended with it.
        return TransactionEvent.FOUND_ENDED
    if evidence.status in _BY_STATUS:
        return _BY_STATUS[evidence.status]
    if evidence.session is None:
        # A prepared transaction, or one that ends at this moment, is still in progress.
        if evidence.status == "in progress":
            return TransactionEvent.FOUND_OPEN
        return TransactionEvent.FOUND_ENDED
    if evidence.session == "idle" and evidence.status is None:
        return TransactionEvent.FOUND_ENDED
    if evidence.session.startswith("idle"):
        return TransactionEvent.FOUND_IDLE
    return TransactionEvent.FOUND_OPEN
