"""Tokens at the edges of their types in the audit, by Hypothesis, in Spark."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.tokens import MAX_TOKEN
from tests.pipeline.audits import Cases, Deployment, Found, found, lines_of
from tests.support.examples import draw_examples

#: The number of consecutive tokens of a history: more than two words of the audit.
_SPAN = 140
#: The first token of a history far from all edges, and of those at edges.
_FAR = 10_000
_FIRST = [
    1,
    2**31 - _SPAN // 2,
    2**53 - _SPAN // 2,
    2**62 - _SPAN // 2,
    MAX_TOKEN - _SPAN + 1,
]
#: A row: its writer, and its place in the span.
_WRITERS = st.sampled_from(["w1", "w2"])
_PLACES = st.integers(0, _SPAN - 1)
_ROWS = st.lists(st.tuples(_WRITERS, _PLACES), max_size=8)
#: A line: its writer, and the places of both tokens; a row has one.
_LINES = st.lists(
    st.tuples(_WRITERS, st.none() | _PLACES, _PLACES).filter(
        lambda line: line[1] is None or line[1] <= line[2]
    ),
    max_size=8,
)


@attrs.frozen
class _History:
    """What tables, archive and a recording contain, by places in the span."""

    tables: Sequence[tuple[str, int]]
    archive: Sequence[tuple[str, int]]
    lines: Sequence[tuple[str, int | None, int]]
    allocated: int | None
    purged: Sequence[tuple[int, int]]

    def at(self, first: int) -> Deployment:
        """Return the deployment whose span begins at a token."""
        lines = [
            f"RDATA events {writer} {first + token} []"
            if previous is None
            else f"POSITION events {writer} {first + previous} {first + token}"
            for writer, previous, token in self.lines
        ]
        allocated = {} if self.allocated is None else {"events": self.allocated + first}
        return Deployment(
            tables=[("events", writer, first + place) for writer, place in self.tables],
            archive=[
                ("events", writer, first + place) for writer, place in self.archive
            ],
            lines=lines_of(lines),
            allocated=allocated,
            purged=[("events", first + a, first + b) for a, b in self.purged],
        )


_HISTORIES = st.builds(
    _History,
    _ROWS,
    _ROWS,
    _LINES,
    st.none() | _PLACES,
    st.lists(st.tuples(_PLACES, _PLACES).map(lambda ends: sorted(ends)), max_size=1),
)


def _moved(findings: Sequence[Found], distance: int) -> list[Found]:
    return [
        (
            *each[:4],
            None if each[4] is None else each[4] + distance,
            None if each[5] is None else each[5] + distance,
            each[6],
        )
        for each in findings
    ]


class EdgeTests(SynchronousTestCase):
    def test_same_findings_everywhere(self) -> None:
        """
        The findings about a history do not depend on its distance from the edges of
        int32, of JSON's integers and of int64: only the tokens in them are others.
        """
        histories = draw_examples(_HISTORIES, 25)
        cases = Cases()
        placed = [
            [
                cases.add(**attrs.asdict(each.at(first), recurse=False))
                for first in (_FAR, *_FIRST)
            ]
            for each in histories
        ]
        kinds = set()
        for history, (far, *others) in zip(histories, placed, strict=True):
            expected = found(far.findings())
            kinds |= {each[0] for each in expected}
            for first, case in zip(_FIRST, others, strict=True):
                self.assertEqual(
                    sorted(_moved(found(case.findings()), _FAR - first), key=str),
                    sorted(expected, key=str),
                    (first, history),
                )
        self.assertGreater(len(kinds), 8, kinds)
