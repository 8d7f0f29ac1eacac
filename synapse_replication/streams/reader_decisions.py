"""The decisions of a reader: verdicts, findings, and the actions of its driver.

:class:`~synapse_replication.streams.reader.Reader` returns them; its driver,
``handlers/receiving/writer_receiver.py``, acts on them.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import attrs


class Verdict(enum.Enum):
    """The decision about the rows of a token that arrived."""

    DELIVER = "deliver"
    FETCH = "fetch"  #: they are fetched instead
    OLD = "old"  #: they were delivered before, or cannot be placed


class Finding(enum.Enum):
    """The conclusion from an announcement."""

    NOTHING = "nothing"  #: the position is already known
    EXPECTED = "expected"  #: the reader follows
    GAP = "gap"  #: rows did not arrive
    RESET = "reset"  #: the position is rewound
    AHEAD = "ahead"  #: rows beyond the writer's own position were delivered


@attrs.frozen(eq=False)
class Fetch:
    """Action: fetch one page of the rows in ``(from_token, upto_token]``.

    :ivar from_source: whether to ask the stream's own source, not the writer's backlog.
    """

    from_token: int
    upto_token: int
    from_source: bool


@attrs.frozen
class Rewind:
    """Action: lower the position to ``token``, and begin ``epoch`` unless ``None``.

    :ivar is_reset: whether rows above ``token`` were delivered.
    """

    token: int
    epoch: str | None = None
    is_reset: bool = attrs.field(default=False, eq=False, repr=False, kw_only=True)


@attrs.frozen
class BeginEpoch:
    """Action: record that the delivered rows, from token 0 on, belong to ``epoch``."""

    epoch: str


@attrs.frozen
class Advance:
    """Action: raise the position to ``token``."""

    token: int


@attrs.frozen
class Pause:
    """Action: wait for ``seconds``, then report :attr:`ReaderEvent.TIMER`."""

    seconds: float


@attrs.frozen
class Connected:
    """Action: report that a link became complete."""

    link: Any


@attrs.frozen
class Ask:
    """Action: request the writer's position on a link, by REPLICATE."""

    link: Any


@attrs.frozen
class Refuted:
    """Action: report that there is no row at ``token``.

    :ivar last_token: the last token that exists, as the source or the writer says.
    """

    token: int
    last_token: int


@attrs.frozen
class Finished:
    """Action: report that a catch-up ended.

    :ivar drained_upto: the last token of a removed writer; ``None`` for another writer.
    """

    drained_upto: int | None


Action: TypeAlias = (
    Fetch | Rewind | BeginEpoch | Advance | Pause | Connected | Ask | Refuted | Finished
)
