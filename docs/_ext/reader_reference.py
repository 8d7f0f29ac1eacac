"""Directives for the tables and pictures of the machines, from their tables in Python.

``reader-table`` and ``reader-picture`` show the reader; ``writer-table`` and
``writer-picture``, with the argument ``transaction`` or ``name``, show the writer.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final, TypeAlias

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from tables import make_table

from synapse_replication.streams.reader_table import ROWS, TABLE, ReaderEvent, State
from synapse_replication.streams.writer_table import (
    NAME,
    TRANSACTION,
    NameState,
    Table,
    TransactionState,
)

_Places: TypeAlias = Mapping[Any, tuple[int, int]]
_Changes: TypeAlias = Mapping[tuple[Any, Any], list[Any]]

#: The centre of each state in the picture.
PLACES: Final = {
    State.WAITING: (110, 60),
    State.LIVE: (790, 60),
    State.DUE: (450, 230),
    State.PAUSED: (110, 430),
    State.FETCHING: (450, 430),
    State.DELIVERING: (790, 430),
}
_HALF_WIDTH, _HALF_HEIGHT = 85, 20

#: The machines of the writer: the title and the table of each, and the centre of each
#: state in the picture.
WRITER: Final[Mapping[str, tuple[str, Table[Any, Any], _Places]]] = {
    "transaction": (
        "The states of a transaction",
        TRANSACTION,
        {
            TransactionState.RUNNING: (110, 60),
            TransactionState.COMMITTING: (450, 60),
            TransactionState.LOST: (790, 230),
            TransactionState.ROLLED_BACK: (110, 430),
            TransactionState.COMMITTED: (450, 430),
            TransactionState.ENDED: (790, 430),
        },
    ),
    "name": (
        "The states of a name",
        NAME,
        {
            NameState.UNLOCKED: (110, 60),
            NameState.WAITING: (790, 60),
            NameState.HELD: (790, 430),
            NameState.LOST: (110, 430),
        },
    ),
}


def changes() -> dict[tuple[State, State], list[ReaderEvent]]:
    """Return the events that lead from each state to each other one."""
    found: dict[tuple[State, State], list[ReaderEvent]] = {}
    for event, row in TABLE.items():
        for before, entry in row.items():
            for after in State:
                if after is not before and after in entry.next_states:
                    found.setdefault((before, after), []).append(event)
    return found


def changes_of(table: Table[Any, Any]) -> _Changes:
    """Return the events that lead from each state of a writer's table to another."""
    found: dict[tuple[enum.Enum, enum.Enum], list[enum.Enum]] = {}
    for (before, event), step in table.items():
        if step.state is not before:
            found.setdefault((before, step.state), []).append(event)
    return found


def draw(title: str, places: _Places, changes: _Changes) -> str:
    """Return the states, and the events that lead from one to another, as SVG."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 540" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>',
        '<rect width="900" height="540" fill="white"/>',
    ]
    for (before, after), events in changes.items():
        names = [event.name.lower() for event in events]
        parts += _arrow(places[before], places[after], names)
    for state, (x, y) in places.items():
        parts.append(
            f'<rect x="{x - _HALF_WIDTH}" y="{y - _HALF_HEIGHT}" rx="10" '
            f'width="{2 * _HALF_WIDTH}" height="{2 * _HALF_HEIGHT}" fill="#eef" '
            f'stroke="black"/><text x="{x}" y="{y + 5}" font-size="14" '
            f'text-anchor="middle">{state.name}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _arrow(
    before: tuple[int, int], after: tuple[int, int], names: list[str]
) -> Iterator[str]:
    (x, y), (to_x, to_y) = before, after
    length = math.hypot(to_x - x, to_y - y)
    # To the left of its direction, so that two opposite arrows do not overlap.
    bend = 55 if length < 450 else 110
    across_x, across_y = (to_y - y) / length, (x - to_x) / length
    middle_x = (x + to_x) / 2 + across_x * bend
    middle_y = (y + to_y) / 2 + across_y * bend
    start_x, start_y = _edge(x, y, middle_x, middle_y)
    end_x, end_y = _edge(to_x, to_y, middle_x, middle_y)
    yield (
        f'<path d="M{start_x:.0f} {start_y:.0f}Q{middle_x:.0f} {middle_y:.0f} '
        f'{end_x:.0f} {end_y:.0f}" fill="none" stroke="#555" marker-end="url(#tip)"/>'
    )
    text_x = (start_x + 2 * middle_x + end_x) / 4
    text_y = (start_y + 2 * middle_y + end_y) / 4 - 5.5 * (len(names) - 1)
    for number, name in enumerate(names):
        # A white outline first, so that lines do not cross the text.
        for outline in ('stroke="white" stroke-width="3" ', ""):
            yield (
                f'<text x="{text_x:.0f}" y="{text_y + 11 * number:.0f}" {outline}'
                f'font-size="10" text-anchor="middle">{escape(name)}</text>'
            )


def _edge(x: int, y: int, towards_x: float, towards_y: float) -> tuple[float, float]:
    """Return where the line from a state's centre leaves its rectangle."""
    step_x, step_y = towards_x - x, towards_y - y
    scale = min(
        _HALF_WIDTH / abs(step_x) if step_x else math.inf,
        _HALF_HEIGHT / abs(step_y) if step_y else math.inf,
    )
    return x + step_x * scale, y + step_y * scale


class ReaderPicture(Directive):
    """The states of a reader, and what leads from one to another."""

    def run(self) -> list[nodes.Node]:
        """Return the picture. Called by docutils."""
        picture = draw("The states of a reader", PLACES, changes())
        return [nodes.raw("", picture, format="html")]


class WriterPicture(Directive):
    """The states of a machine of the writer, and what leads from one to another."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the picture. Called by docutils."""
        title, table, places = WRITER[self.arguments[0]]
        picture = draw(title, places, changes_of(table))
        return [nodes.raw("", picture, format="html")]


class WriterTable(Directive):
    """A table with one row for each state and event of a machine of the writer."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table. Called by docutils."""
        _, table, _ = WRITER[self.arguments[0]]
        return make_table(
            self,
            (
                (
                    before.name,
                    f"``{event.name}``: {event.value}",
                    "the same" if step.state is before else step.state.name,
                    "; ".join(effect.value for effect in step.effects) or "nothing",
                )
                for (before, event), step in table.items()
            ),
            header=("State", "Event", "Next state", "What the driver does"),
            widths=(20, 35, 15, 30),
            source="streams/writer_table.py",
        )


class ReaderTable(Directive):
    """A table with one row for each event and each effect that it has."""

    def run(self) -> list[nodes.Node]:
        """Return the table. Called by docutils."""
        return make_table(
            self,
            (
                (
                    f"``{event.name}``: {event.value}",
                    ", ".join(state.name for state in row.states),
                    row.effect,
                    ", ".join(state.name for state in row.next_states) or "the same",
                )
                for event, rows in ROWS.items()
                for row in rows
            ),
            header=("Event", "State", "What happens", "Next state"),
            widths=(25, 15, 45, 15),
            source="streams/reader_table.py",
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives with Sphinx."""
    app.add_directive("reader-table", ReaderTable)
    app.add_directive("reader-picture", ReaderPicture)
    app.add_directive("writer-table", WriterTable)
    app.add_directive("writer-picture", WriterPicture)
    return {"parallel_read_safe": True}
