"""The states and events of a reader, and the states that may follow each event.

Theory of operation: :data:`TABLE` is derived from :data:`ROWS`, from which the manual's
table and picture are made, too. :class:`~synapse_replication.streams.reader.Reader`
checks each event against the table: the state in which it happens, and the state that
follows.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping, Sequence
from typing import Final

import attrs


class State(enum.Enum):
    """The state of a writer at its reader."""

    WAITING = "waiting for POSITION"  #: on no link was a POSITION handled
    LIVE = "live"  #: rows are delivered as they arrive
    DUE = "due"  #: something is missing, and the next action can be taken
    FETCHING = "fetching"  #: a page was requested
    DELIVERING = "delivering"  #: a page is being delivered
    PAUSED = "paused"  #: something is missing, and a timer runs


class ReaderEvent(enum.Enum):
    """An event of a writer, a link, an action or the driver."""

    LINK_UP = "a link came up"
    LINK_LOST = "a link was lost"
    BATCH = "the rows of a token arrived"
    LOST_ROWS = "rows were lost on a link"
    POSITION = "POSITION arrived"
    REPORT = "a position was reported"
    STORED = "a stored position is ahead"
    EPOCH = "an epoch was reported"
    REMOVED = "the writer was removed"
    OVERFLOW = "queued rows are given up"
    UNREADABLE = "a row cannot be decoded"
    DELIVERY_FAILED = "the sink failed"
    PAGE = "a page arrived"
    PAGE_DELIVERED = "a page was delivered"
    REWOUND = "the position was rewound"
    EPOCH_BEGUN = "an epoch was begun"
    ADVANCED = "the position was advanced"
    FAILED = "an action failed"
    BEHIND = "the source is behind"
    TIMER = "the timer is due"
    NEXT = "the next action is taken"


@attrs.frozen
class Row:
    """The effect of an event, which is the same in several states.

    :ivar states: the states in which the event may happen.
    :ivar effect: what happens.
    :ivar next_states: the states that may follow; none if the state remains the same.
    """

    states: Sequence[State]
    effect: str
    next_states: Sequence[State] = ()


@attrs.frozen
class Entry:
    """The effect of an event in one state.

    :ivar effect: what happens.
    :ivar next_states: the states that may follow.
    """

    effect: str
    next_states: Container[State]


#: The consequences of each event, by the states in which it may happen.
ROWS: Final[Mapping[ReaderEvent, Sequence[Row]]] = {
    ReaderEvent.LINK_UP: (
        Row(
            (State.WAITING, State.LIVE, State.DUE, State.FETCHING, State.DELIVERING),
            "The link waits for POSITION.",
        ),
        Row(
            (State.PAUSED,), "The first link ends the pause.", (State.DUE, State.PAUSED)
        ),
    ),
    ReaderEvent.LINK_LOST: (
        Row(
            (State.LIVE,),
            "Rows of the other links are still live.",
            (State.WAITING, State.LIVE),
        ),
        Row(
            (State.WAITING, State.DUE, State.FETCHING, State.PAUSED),
            "What is missing remains missing.",
        ),
    ),
    ReaderEvent.BATCH: (
        Row(
            (State.LIVE,),
            "The rows are delivered, or are old, or a catch-up for them begins.",
            (State.LIVE, State.DUE),
        ),
        Row((State.DUE, State.PAUSED), "The rows are to be fetched, or are old."),
        Row(
            (State.FETCHING,),
            "The same. If pages before this one lack these rows, it is given up.",
            (State.DUE, State.FETCHING),
        ),
        Row(
            (State.DELIVERING,),
            "The same. A page that lacks these rows is given up.",
            (State.DUE, State.DELIVERING),
        ),
    ),
    ReaderEvent.LOST_ROWS: (
        Row(
            (
                State.WAITING,
                State.LIVE,
                State.DUE,
                State.FETCHING,
                State.DELIVERING,
                State.PAUSED,
            ),
            "The next batch on the link is to be fetched.",
        ),
    ),
    ReaderEvent.POSITION: (
        Row((State.WAITING,), "The link opens.", (State.DUE,)),
        Row(
            (State.LIVE,),
            "The position is to advance or, if the link contradicts itself, to be "
            "lowered.",
            (State.LIVE, State.DUE),
        ),
        Row((State.DUE,), "The target rises, or the stream begins anew."),
        Row(
            (State.FETCHING,),
            "The target rises, or the stream begins anew without the page.",
            (State.DUE, State.FETCHING),
        ),
        Row(
            (State.DELIVERING,),
            "The target rises, or the stream begins anew without the page.",
            (State.DUE, State.DELIVERING),
        ),
        Row((State.PAUSED,), "The target rises, and the pause ends.", (State.DUE,)),
    ),
    ReaderEvent.REPORT: (
        Row(
            (State.WAITING,),
            "The link opens, unless the token is too low.",
            (State.WAITING, State.DUE),
        ),
        Row(
            (State.LIVE,),
            "The position is to advance or, if the link contradicts itself, to be "
            "lowered.",
            (State.LIVE, State.DUE),
        ),
        Row((State.DUE,), "The target rises."),
        Row(
            (State.FETCHING,),
            "The target rises. If the link opens, the stream may begin anew.",
            (State.DUE, State.FETCHING),
        ),
        Row(
            (State.DELIVERING,),
            "The target rises. If the link opens, the stream may begin anew.",
            (State.DUE, State.DELIVERING),
        ),
        Row(
            (State.PAUSED,),
            "The target rises. If the link opens, the stream may begin anew.",
            (State.DUE, State.PAUSED),
        ),
    ),
    ReaderEvent.STORED: (
        Row(
            (State.WAITING,),
            "Rows up to the token are to be fetched.",
            (State.WAITING, State.DUE),
        ),
        Row(
            (State.LIVE,),
            "Rows up to the token are to be fetched.",
            (State.LIVE, State.DUE),
        ),
        Row((State.DUE, State.FETCHING, State.PAUSED), "The target rises."),
    ),
    ReaderEvent.EPOCH: (
        Row(
            (State.WAITING,),
            "The epoch, or the stream anew, is to begin.",
            (State.WAITING, State.DUE),
        ),
        Row(
            (State.LIVE,),
            "The epoch, or the stream anew, is to begin.",
            (State.LIVE, State.DUE),
        ),
        Row((State.DUE,), "The epoch, or the stream anew, is to begin."),
        Row(
            (State.FETCHING,),
            "The same. A page that may be of another epoch is given up.",
            (State.DUE, State.FETCHING),
        ),
        Row(
            (State.DELIVERING,),
            "The same. A page that may be of another epoch is given up.",
            (State.DUE, State.DELIVERING),
        ),
        Row(
            (State.PAUSED,),
            "The epoch, or the stream anew, is to begin.",
            (State.DUE, State.PAUSED),
        ),
    ),
    ReaderEvent.REMOVED: (
        Row(
            (State.WAITING,),
            "Its last rows are to be fetched.",
            (State.WAITING, State.DUE),
        ),
        Row((State.LIVE,), "Its last rows are to be fetched.", (State.LIVE, State.DUE)),
        Row((State.DUE, State.PAUSED), "The target rises to its last token."),
        Row(
            (State.FETCHING,),
            "The target rises to its last token. The first time, the page is given up.",
            (State.DUE, State.FETCHING),
        ),
    ),
    ReaderEvent.OVERFLOW: (
        Row(
            (State.WAITING, State.LIVE), "What arrives is to be fetched.", (State.DUE,)
        ),
        Row(
            (State.DUE, State.FETCHING, State.PAUSED), "What arrives is fetched anyway."
        ),
        Row(
            (State.DELIVERING,),
            "What arrives is fetched anyway; a row that the page lacks makes it "
            "obsolete.",
            (State.DELIVERING, State.DUE),
        ),
    ),
    ReaderEvent.UNREADABLE: (
        Row(
            (State.LIVE, State.DUE),
            "The row is to be fetched from the source.",
            (State.DUE,),
        ),
        Row((State.PAUSED,), "The row is to be fetched from the source."),
        Row(
            (State.DELIVERING,),
            "The page is given up, and is to be fetched from the source.",
            (State.DUE,),
        ),
    ),
    ReaderEvent.DELIVERY_FAILED: (
        Row(
            (State.LIVE, State.DUE, State.PAUSED),
            "The rows are to be fetched later.",
            (State.PAUSED,),
        ),
    ),
    ReaderEvent.PAGE: (
        Row(
            (State.FETCHING,),
            "The page is checked. If it is wanted, its delivery begins.",
            (State.DUE, State.DELIVERING),
        ),
    ),
    ReaderEvent.PAGE_DELIVERED: (
        Row(
            (State.DELIVERING,),
            "The rows of the page are not missing any more.",
            (State.DUE, State.FETCHING),
        ),
    ),
    ReaderEvent.REWOUND: (Row((State.DUE,), "The position is lower."),),
    ReaderEvent.EPOCH_BEGUN: (
        Row((State.DUE, State.FETCHING, State.DELIVERING), "The epoch is known."),
    ),
    ReaderEvent.ADVANCED: (
        Row(
            (State.DUE,),
            "The position is higher. If nothing is missing, the catch-up ends.",
            (State.WAITING, State.LIVE, State.DUE),
        ),
    ),
    ReaderEvent.FAILED: (
        Row(
            (State.DUE, State.FETCHING, State.DELIVERING),
            "The catch-up pauses.",
            (State.PAUSED,),
        ),
    ),
    ReaderEvent.BEHIND: (
        Row(
            (State.FETCHING,),
            "The catch-up pauses, and the writer is asked for its position.",
            (State.PAUSED,),
        ),
    ),
    ReaderEvent.TIMER: (
        Row(
            (State.WAITING, State.LIVE, State.DUE, State.FETCHING),
            "Nothing: the pause ended before.",
        ),
        Row((State.PAUSED,), "The pause ends.", (State.DUE,)),
    ),
    ReaderEvent.NEXT: (
        Row(
            (State.DUE,),
            "The position or the epoch changes, a page is fetched, a pause begins, or "
            "the catch-up ends.",
            (State.WAITING, State.LIVE, State.DUE, State.FETCHING, State.PAUSED),
        ),
        Row((State.DELIVERING,), "The page after this one is requested."),
        Row(
            (State.WAITING, State.LIVE, State.FETCHING, State.PAUSED),
            "Nothing, except to report.",
        ),
    ),
}

#: For each event and each state in which it may happen, what happens.
TABLE: Mapping[ReaderEvent, Mapping[State, Entry]] = {
    event: {
        state: Entry(row.effect, row.next_states or (state,))
        for row in rows
        for state in row.states
    }
    for event, rows in ROWS.items()
}
