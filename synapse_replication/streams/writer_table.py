"""The states, events and effects of a writer's transactions and of its name.

Theory of operation: :data:`TRANSACTION` and :data:`NAME` say which state follows each
event, and what the driver then does. The manual's tables and pictures are made from
them. :mod:`~synapse_replication.streams.writer` applies them; an event that a state
does not expect is a defect of this package.

See docs/storage.rst.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import attrs


class TransactionState(enum.Enum):
    """The state of a transaction, as its process knows it."""

    RUNNING = "running"  #: COMMIT was not sent
    COMMITTING = "committing"  #: COMMIT was sent, and not answered yet
    LOST = "answer lost"  #: COMMIT was sent, and its connection broke
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    ENDED = "ended"  #: it has ended, and its outcome cannot be read any more


#: The states in which a transaction has ended: its ids are settled.
SETTLED: Final = frozenset(
    {TransactionState.COMMITTED, TransactionState.ROLLED_BACK, TransactionState.ENDED}
)


class TransactionEvent(enum.Enum):
    """An event of a transaction, or what the database says about it afterwards."""

    COMMIT_SENT = "COMMIT is sent"
    ACKNOWLEDGED = "COMMIT was acknowledged"
    REFUSED = "an error and a rollback were acknowledged"
    DISCONNECTED = "the connection broke"
    FOUND_OPEN = "it is found open"
    FOUND_IDLE = "it is found open, waiting for its client"
    FOUND_COMMITTED = "it is found committed"
    FOUND_ROLLED_BACK = "it is found rolled back"
    FOUND_ENDED = "it is found ended"
    NOT_FOUND_OUT = "the database does not answer"


class NameState(enum.Enum):
    """The state of the name of a process that writes."""

    UNLOCKED = "unlocked"  #: another process may hold it
    WAITING = "waiting"  #: the lock is held, commits of the predecessor are in progress
    HELD = "held"
    LOST = "lost"  #: another process has acquired it


class NameEvent(enum.Enum):
    """An event of a name."""

    LOCKED = "the lock was acquired"
    LOCK_REFUSED = "another session holds the lock for too long"
    WAITED_LONG = "a commit of the predecessor lasts long"
    ACQUIRED = "the term was acquired"
    SESSION_LOST = "the session of the lock ended"
    REFUSED = "PostgreSQL refused a transaction or a check"


class Effect(enum.Enum):
    """An action of the driver."""

    CALL_AFTER = "run the callbacks for a commit"
    CALL_ON_EXCEPTION = "run the callbacks for a rollback"
    SETTLE = "settle its ids"
    ASK = "ask the database again"
    END_SESSION = "end its session"
    ACQUIRE = "acquire the term"
    END_PREDECESSOR = "end the sessions of the predecessor"
    ADMIT = "begin to write"
    LOCK = "lock the name again"
    STOP = "write no more, and exit with status 1"


_T = TransactionState
_N = NameState
_StateT = TypeVar("_StateT", bound=enum.Enum)
_EventT = TypeVar("_EventT", bound=enum.Enum)


@attrs.frozen
class Step(Generic[_StateT]):
    """The consequence of an event.

    :ivar state: the state that follows.
    :ivar effects: the driver takes these, in order.
    """

    state: _StateT
    effects: Sequence[Effect] = ()


Table: TypeAlias = Mapping[tuple[_StateT, _EventT], Step[_StateT]]

_COMMITTED = Step(_T.COMMITTED, (Effect.SETTLE, Effect.CALL_AFTER))
_ROLLED_BACK = Step(_T.ROLLED_BACK, (Effect.SETTLE, Effect.CALL_ON_EXCEPTION))

#: Each event of a transaction, by the state in which it may happen.
TRANSACTION: Final[Table[TransactionState, TransactionEvent]] = {
    (_T.RUNNING, TransactionEvent.COMMIT_SENT): Step(_T.COMMITTING),
    (_T.RUNNING, TransactionEvent.REFUSED): _ROLLED_BACK,
    # A transaction whose COMMIT was never sent cannot be committed.
    (_T.RUNNING, TransactionEvent.DISCONNECTED): _ROLLED_BACK,
    (_T.COMMITTING, TransactionEvent.ACKNOWLEDGED): _COMMITTED,
    (_T.COMMITTING, TransactionEvent.REFUSED): _ROLLED_BACK,
    (_T.COMMITTING, TransactionEvent.DISCONNECTED): Step(_T.LOST, (Effect.ASK,)),
    (_T.LOST, TransactionEvent.NOT_FOUND_OUT): Step(_T.LOST, (Effect.ASK,)),
    (_T.LOST, TransactionEvent.FOUND_OPEN): Step(_T.LOST, (Effect.ASK,)),
    # Its COMMIT has not arrived, and may still do so: the session must not be there.
    (_T.LOST, TransactionEvent.FOUND_IDLE): Step(
        _T.LOST, (Effect.END_SESSION, Effect.ASK)
    ),
    (_T.LOST, TransactionEvent.FOUND_COMMITTED): _COMMITTED,
    (_T.LOST, TransactionEvent.FOUND_ROLLED_BACK): _ROLLED_BACK,
    (_T.LOST, TransactionEvent.FOUND_ENDED): Step(_T.ENDED, (Effect.SETTLE,)),
}

#: Each event of a name, by the state in which it may happen.
NAME: Final[Table[NameState, NameEvent]] = {
    (_N.UNLOCKED, NameEvent.LOCKED): Step(_N.WAITING, (Effect.ACQUIRE,)),
    (_N.UNLOCKED, NameEvent.LOCK_REFUSED): Step(_N.LOST, (Effect.STOP,)),
    (_N.WAITING, NameEvent.WAITED_LONG): Step(_N.WAITING, (Effect.END_PREDECESSOR,)),
    (_N.WAITING, NameEvent.SESSION_LOST): Step(_N.UNLOCKED, (Effect.LOCK,)),
    (_N.WAITING, NameEvent.ACQUIRED): Step(_N.HELD, (Effect.ADMIT,)),
    # The term remains: nobody else has acquired the name.
    (_N.HELD, NameEvent.SESSION_LOST): Step(_N.HELD, (Effect.LOCK,)),
    (_N.HELD, NameEvent.LOCKED): Step(_N.HELD),
    (_N.HELD, NameEvent.LOCK_REFUSED): Step(_N.LOST, (Effect.STOP,)),
    (_N.HELD, NameEvent.REFUSED): Step(_N.LOST, (Effect.STOP,)),
    (_N.LOST, NameEvent.REFUSED): Step(_N.LOST),
}
