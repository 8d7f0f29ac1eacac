"""The state of a reader as a value, and what else only the exploration does with it.

No other module of the exploration sees what is private in a reader. The value of an
object has all its fields, in the order of its class. So a new field is part of the
state without a change here, unless its value is not of a built-in type: then the
exploration fails.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from operator import attrgetter
from typing import Any, Final, TypeAlias

import attrs

from synapse_replication.streams.pages import Page
from synapse_replication.streams.reader import Reader
from synapse_replication.streams.reader_decisions import Fetch
from synapse_replication.streams.reader_state import (
    CatchUpPace,
    CatchUpState,
    EmptyRange,
    LinkPhase,
    LinkState,
)

#: A state as a value of built-in types.
Frozen: TypeAlias = tuple[Any, ...]

_PHASES: Final = tuple(LinkPhase)
_PACES: Final = tuple(CatchUpPace)


def _names(class_: type, omitted: frozenset[str] = frozenset()) -> list[str]:
    names = [field.name for field in attrs.fields(class_)]
    return [name for name in names if name not in omitted]


# The reports are taken before the next event, and the others never change.
_READER: Final = _names(
    Reader,
    frozenset({"_policy", "_is_plausible", "_host_position", "_report", "_reports"}),
)
_LINK: Final = _names(LinkState)
_EMPTY_RANGE: Final = _names(EmptyRange)
_CATCH_UP: Final = _names(CatchUpState)

_of_reader: Final = attrgetter(*_READER)
_of_link: Final = attrgetter(*_LINK)
_of_empty_range: Final = attrgetter(*_EMPTY_RANGE)
_of_catch_up: Final = attrgetter(*_CATCH_UP)
_of_fetch: Final = attrgetter(*_names(Fetch))

_POSITION, _LINKS, _EMPTY, _OF_CATCH_UP, _REQUEST, _PAGE, _CURSOR, _EXPECTED = map(
    _READER.index,
    (
        "_position",
        "_links",
        "_empty",
        "_catch_up",
        "_request",
        "_page",
        "_page_cursor",
        "_expected",
    ),
)
_DUE, _START = map(_READER.index, ("_due", "_start"))
_PHASE, _PENDING, _FROM_START, _EPOCH = map(
    _LINK.index, ("phase", "pending", "is_from_start", "epoch")
)
_MIDDLE, _SINCE, _CHECK = map(_EMPTY_RANGE.index, ("middle", "since", "check_from"))
_ATTEMPTS, _LACKING, _PACE = map(_CATCH_UP.index, ("attempts", "lacking", "pace"))


def freeze(
    reader: Reader, *, with_epochs: bool, with_bursts: bool
) -> tuple[Frozen, dict[Hashable, Frozen]]:
    """Return the state of a reader, and that of each link, as values.

    They omit what has no effect on what follows: the texts of rows, the number of
    failures beyond the first, and all but the ends of the empty range.

    :param with_epochs: whether the writer may state an epoch.
    :param with_bursts: whether the number of fetches that begin is limited.
    """
    values = list(_of_reader(reader))
    links = {
        link: _freeze_link(each, with_epochs) for link, each in values[_LINKS].items()
    }
    values[_LINKS] = None
    if (empty := values[_EMPTY]) is not None:
        values[_EMPTY] = _freeze_empty_range(reader, empty)
    if (catch_up := values[_OF_CATCH_UP]) is not None:
        values[_OF_CATCH_UP] = _freeze_catch_up(catch_up)
    if (request := values[_REQUEST]) is None:
        values[_EXPECTED] = ()
    else:
        values[_REQUEST] = _of_fetch(request)
        values[_EXPECTED] = tuple(values[_EXPECTED])
    if (page := values[_PAGE]) is None:
        values[_CURSOR] = 0
    else:
        values[_PAGE] = tuple(page.tokens), page.upto_token
    values[_DUE] = round(values[_DUE], 3) if with_bursts else 0.0
    if values[_START] is not None:
        values[_START] = round(values[_START], 3)
    return tuple(values), links


def _freeze_link(link: LinkState, with_epochs: bool) -> Frozen:
    values = list(_of_link(link))
    values[_PHASE] = _PHASES.index(values[_PHASE])
    values[_PENDING] = len(values[_PENDING])
    values[_FROM_START] = values[_FROM_START] and with_epochs
    # Links are sorted, so a text is not compared with None.
    values[_EPOCH] = values[_EPOCH] or ""
    return tuple(values)


def _freeze_empty_range(reader: Reader, empty: EmptyRange) -> Frozen | None:
    if empty.end not in (reader._host_position(), reader._position):
        return None
    if empty.start == empty.end and not empty.check_from:
        return None
    values = list(_of_empty_range(empty))
    values[_MIDDLE], values[_SINCE] = empty.start, 0.0
    values[_CHECK] = round(values[_CHECK], 3)
    return tuple(values)


def _freeze_catch_up(catch_up: CatchUpState) -> Frozen:
    values = list(_of_catch_up(catch_up))
    values[_ATTEMPTS] = min(values[_ATTEMPTS], 1)
    values[_LACKING] = min(values[_LACKING], 1)
    values[_PACE] = _PACES.index(values[_PACE])
    return tuple(values)


def thaw(reader: Reader, frozen: Frozen, links: Mapping[Hashable, Frozen]) -> None:
    """Set the state of a reader to one that :func:`freeze` returned."""
    values = list(frozen)
    values[_LINKS] = {link: _thaw_link(each) for link, each in links.items()}
    if (empty := values[_EMPTY]) is not None:
        values[_EMPTY] = EmptyRange(*empty)
    if (catch_up := values[_OF_CATCH_UP]) is not None:
        of_catch_up = list(catch_up)
        of_catch_up[_PACE] = _PACES[of_catch_up[_PACE]]
        values[_OF_CATCH_UP] = CatchUpState(*of_catch_up)
    if (request := values[_REQUEST]) is not None:
        values[_REQUEST] = Fetch(*request)
    if (page := values[_PAGE]) is not None:
        tokens, upto = page
        values[_PAGE] = Page(list(tokens), [None] * len(tokens), upto)
    values[_EXPECTED] = list(values[_EXPECTED])
    for name, value in zip(_READER, values, strict=True):
        setattr(reader, name, value)


def _thaw_link(frozen: Frozen) -> LinkState:
    values = list(frozen)
    values[_PHASE] = _PHASES[values[_PHASE]]
    values[_PENDING] = [b""] * values[_PENDING]
    values[_EPOCH] = values[_EPOCH] or None
    return LinkState(*values)


def without_position(frozen: Frozen) -> Frozen:
    """Return the state of a reader without its position."""
    return frozen[:_POSITION] + frozen[_POSITION + 1 :]


def is_waiting_on(reader: Reader, link: Hashable) -> bool:
    """Return whether no POSITION was handled on a link."""
    return reader._links[link].phase is LinkPhase.WAITING


def is_complete_on(reader: Reader, link: Hashable) -> bool:
    """Return whether every row that a link should carry arrived or is missing."""
    return reader._links[link].phase is LinkPhase.COMPLETE


def can_act_during_fetch(reader: Reader) -> bool:
    """Return whether a reader has an action that it can take before a page comes."""
    catch_up = reader._catch_up
    begins_epoch = catch_up is not None and (
        catch_up.epoch is not None and catch_up.rewind_to is None
    )
    must_ask = any(link.must_ask for link in reader._links.values())
    return begins_epoch or must_ask or bool(reader._reports)


def delay(reader: Reader) -> float:
    """Return the time after which the limit of fetches has no effect, in s."""
    return reader._due


def awaits_check(reader: Reader) -> bool:
    """Return whether a check of the empty range waits until an interval is over."""
    return reader._empty is not None and reader._empty.check_from > 0


def end_check_interval(reader: Reader) -> None:
    """Let the empty range be checked again."""
    if reader._empty is not None:
        reader._empty.check_from = 0.0


def elapse(reader: Reader, seconds: float) -> None:
    """Bring the times that limit fetches nearer to time 0, that of the clock."""
    reader._due = max(0.0, reader._due - seconds)
    if reader._start is not None:
        reader._start = max(0.0, reader._start - seconds)
