"""Property tests for :mod:`synapse_replication.pipeline.source.offsets`."""

from __future__ import annotations

import json
import pickle

from hypothesis import HealthCheck, given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.source.offsets import (
    StreamOffset,
    offsets_from_json,
    offsets_to_json,
)

WRITERS = ("a", "b", "c")
#: The last writer is not in any offset.
ALL_WRITERS = (*WRITERS, "unknown")

ids = st.integers(0, 12)
offsets = st.builds(
    StreamOffset, ids, st.dictionaries(st.sampled_from(WRITERS), ids, max_size=3)
)


def covered(offset: StreamOffset) -> set[tuple[str, int]]:
    """Return each ``(writer, id)`` that an offset covers."""
    return {
        (w, id_) for w in ALL_WRITERS for id_ in range(14) if id_ <= offset.position(w)
    }


#: The same examples in each run, however slow the machine is.
deterministic = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class StreamOffsetTests(SynchronousTestCase):
    """Tests for one stream's offset."""

    @deterministic
    @given(offsets, offsets)
    def test_advance_covers_both(self, one: StreamOffset, other: StreamOffset) -> None:
        """The maximum covers exactly the rows that either offset covers."""
        self.assertEqual(covered(one.advance(other)), covered(one) | covered(other))

    @deterministic
    @given(offsets, offsets)
    def test_minimum_covers_common_rows(
        self, one: StreamOffset, other: StreamOffset
    ) -> None:
        """The minimum covers exactly the rows that both offsets cover."""
        self.assertEqual(covered(one.retreat(other)), covered(one) & covered(other))

    @deterministic
    @given(offsets, offsets, ids)
    def test_towards(self, start: StreamOffset, more: StreamOffset, upto: int) -> None:
        """Advancing to an id covers exactly the target's rows up to that id."""
        target = start.advance(more)
        part = {(w, id_) for w, id_ in covered(target) if id_ <= upto}
        self.assertEqual(covered(start.towards(target, upto)), covered(start) | part)

    @deterministic
    @given(offsets, st.lists(ids, max_size=4))
    def test_steps_make_the_whole(self, target: StreamOffset, steps: list[int]) -> None:
        """Steps of any size end at the target, and never decrease."""
        at = StreamOffset()
        for upto in sorted(steps):
            after = at.towards(target, upto)
            self.assertLessEqual(covered(at), covered(after))
            at = after
        self.assertEqual(covered(at.towards(target, target.furthest)), covered(target))

    @deterministic
    @given(offsets)
    def test_json_and_pickle(self, offset: StreamOffset) -> None:
        """
        Converting an offset to JSON, or pickling it, and back preserves the offset.
        """
        (value,) = offsets_to_json({"events": offset}).values()
        self.assertEqual(StreamOffset.from_json(json.loads(json.dumps(value))), offset)
        self.assertEqual(pickle.loads(pickle.dumps(offset)), offset)

    def test_writer_below_minimum(self) -> None:
        """
        A writer below the minimum has its own position; an unknown one has the minimum.
        """
        offset = StreamOffset(5, {"a": 0, "b": 5})
        self.assertEqual([offset.position(w) for w in ("a", "b", "new")], [0, 5, 5])
        self.assertEqual(StreamOffset().furthest, 0)
        self.assertEqual((offset.least, offset.furthest), (0, 5))

    @deterministic
    @given(offsets)
    def test_naming(self, offset: StreamOffset) -> None:
        """An offset that contains a further writer covers the same rows."""
        named = offset.naming(["unknown"])
        self.assertEqual(covered(named), covered(offset))
        self.assertIn("unknown", named.writers)

    def test_bad_json(self) -> None:
        """The error for an invalid position contains an example of a valid one."""
        wrong: tuple[object, ...] = (
            -1,
            True,
            "5",
            2**63,
            [],
            {"minimum": -1},
            {"writers": []},
            {"writers": {"a": 1.5}},
            {"more": 1},
        )
        for value in wrong:
            error = self.assertRaises(PipelineError, StreamOffset.from_json, value)
            self.assertIn('{"minimum": 5, "writers": {"master": 7}}', str(error))


class OffsetsTests(SynchronousTestCase):
    """Tests for the offsets of all streams."""

    @deterministic
    @given(st.dictionaries(st.sampled_from(("events", "a", "z")), offsets))
    def test_text_is_the_same(self, found: dict[str, StreamOffset]) -> None:
        """Equal offsets have the same JSON text, which Spark compares."""
        backwards = {
            name: StreamOffset(
                offset.minimum, dict(sorted(offset.writers.items(), reverse=True))
            )
            for name, offset in sorted(found.items(), reverse=True)
        }
        texts = {json.dumps(offsets_to_json(each)) for each in (found, backwards)}
        self.assertEqual(len(texts), 1)
        self.assertEqual(offsets_from_json(json.loads(texts.pop())), found)

    def test_bad_json(self) -> None:
        """The error for an invalid offset names the stream."""
        error = self.assertRaises(PipelineError, offsets_from_json, {"events": "x"})
        self.assertIn("stream events", str(error))
        self.assertRaises(PipelineError, offsets_from_json, [1])
