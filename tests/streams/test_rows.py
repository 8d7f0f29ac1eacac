"""Tests of typed rows and their JSON text."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import LocalProtocolError, RowDecodeError
from synapse_replication.streams.rows import (
    AttrsRowCodec,
    DecodedRows,
    RawRowCodec,
    compact_json_rows,
    decode_json,
    encode_json,
    encode_json_rows,
    fast_class,
)

TEXTS = st.text(st.characters(blacklist_categories=["Cs"]))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=10,
)


@attrs.frozen
class Row:
    """A row type of the tests."""

    name: str
    count: int
    keys: list[str] | None = None
    data: Any = None


CODEC = AttrsRowCodec("things", Row)


class JsonTests(SynchronousTestCase):
    """``encode_json`` and ``decode_json``."""

    @settings(derandomize=True, deadline=None)
    @given(JSON)
    def test_round_trip(self, value: Any) -> None:
        """A JSON value is decoded exactly as it was encoded, and is one line."""
        text = encode_json(value)
        self.assertEqual(repr(decode_json(text)), repr(value))
        self.assertEqual(decode_json(text.decode()), value)
        self.assertNotIn(b"\n", text)

    @settings(derandomize=True, deadline=None)
    @given(JSON)
    def test_compatible_with_standard_library(self, value: Any) -> None:
        """JSON is compatible with the standard library in both directions."""
        self.assertEqual(repr(decode_json(json.dumps(value))), repr(value))
        self.assertEqual(repr(json.loads(encode_json(value))), repr(value))

    @settings(derandomize=True, deadline=None)
    @given(st.lists(JSON))
    def test_many_at_a_time(self, values: list[Any]) -> None:
        """Values encoded together have the same texts as those encoded singly."""
        self.assertEqual(encode_json_rows(values), list(map(encode_json, values)))

    def test_one_unencodable_among_many(self) -> None:
        """One value that JSON cannot encode among others raises an error."""
        for bad in (math.nan, [None, -math.inf], {"a": [math.inf]}, "\ud800", object()):
            with self.assertRaises(ValueError):
                encode_json_rows([["null", None], bad, [None]])

    def test_compact(self) -> None:
        """The encoding is compact, and tuples become arrays."""
        self.assertEqual(encode_json(["a", ({"b": 1},)]), b'["a",[{"b":1}]]')

    def test_strict(self) -> None:
        """Text that is not JSON is refused; the error does not repeat it."""
        for text in (
            "NaN",
            "[Infinity]",
            "[-Infinity]",
            "[1e400]",
            "[1,]",
            "[1] 2",
            "{'a':1}",
            "",
            "secret",
            "[" * 100_000,
            '["\ud800"]',
            b'["\xff"]',
            b'["a\nb"]',
        ):
            error = self.assertRaises(ValueError, decode_json, text)
            self.assertNotIn("secret", str(error))

    def test_not_json(self) -> None:
        """A value that JSON cannot encode is refused."""
        cycle: list[Any] = []
        cycle.append(cycle)
        nan, inf = float("nan"), float("inf")
        for value in (
            nan,
            [inf],
            [None, -inf],
            {"a": [None, {"b": (nan,)}]},
            [object()],
            ["\ud800"],
            {1j: 1},
            cycle,
        ):
            self.assertRaises(ValueError, encode_json, value)

    def test_known_nones_hide_no_nan(self) -> None:
        """The hint for the number of ``None`` values does not let a NaN pass."""
        self.assertEqual(encode_json((None, 1), 1), b"[null,1]")
        self.assertEqual(
            encode_json((None, [None], "null"), 1), b'[null,[null],"null"]'
        )
        for value in ((None, math.nan), (None, "null", [math.inf])):
            with self.assertRaises(ValueError):
                encode_json(value, 1)

    def test_null_is_no_nan(self) -> None:
        """A row may contain nulls."""
        value = [None, "null", {"null": [1.5, None]}]
        self.assertEqual(decode_json(encode_json(value)), value)

    def test_rows_that_are_json(self) -> None:
        """Rows that are JSON already are made compact, or rejected."""
        texts: list[bytes | str] = ['["a",  null]', b'{"b": 1.5}', '"\\u00e9"', "[\n2]"]
        self.assertEqual(
            compact_json_rows(texts), [encode_json(decode_json(text)) for text in texts]
        )
        self.assertEqual(compact_json_rows([]), [])
        for bad in ("[", "[NaN]", "[1e999]", "[-Infinity]", '"\\ud800"'):
            with self.assertRaises(ValueError):
                compact_json_rows(["[]", bad])


class RowCodecTests(SynchronousTestCase):
    """``AttrsRowCodec``."""

    @settings(derandomize=True, deadline=None)
    @given(
        st.lists(
            st.builds(
                Row, TEXTS, st.integers(-(2**63), 2**63 - 1), st.lists(TEXTS), JSON
            )
        )
    )
    def test_round_trip(self, rows: list[Row]) -> None:
        """Rows are decoded exactly as they were encoded, as text and as values."""
        self.assertEqual(
            CODEC.decode([CODEC.encode(row) for row in rows]), DecodedRows(rows)
        )
        self.assertEqual([CODEC.from_json(CODEC.to_json(row)) for row in rows], rows)

    def test_order_of_fields(self) -> None:
        """The fields of a row are the elements of an array, in order."""
        row = Row("a", 1, ["k"], {"x": 2})
        self.assertEqual(CODEC.encode(row), b'["a",1,["k"],{"x":2}]')
        self.assertEqual(CODEC.decode([b'["a",1,["k"],{"x":2}]']).rows, [row])

    def test_older_peer(self) -> None:
        """Fields with a default may be missing."""
        self.assertEqual(
            CODEC.decode([b'["a",1]', b'["b",2,["k"]]', b'["c",3,null,4]']),
            DecodedRows([Row("a", 1), Row("b", 2, ["k"]), Row("c", 3, None, 4)]),
        )

    def test_newer_peer(self) -> None:
        """Unknown fields are counted and skipped."""
        self.assertEqual(
            CODEC.decode([b'["a",1,null,null,"new",[]]', b'["b",2,null,null]']),
            DecodedRows([Row("a", 1), Row("b", 2)], with_extra_fields=1),
        )
        self.assertEqual(CODEC.from_json(["a", 1, None, None, "new"]), Row("a", 1))

    def test_wrong_rows(self) -> None:
        """An invalid row raises an error with its stream, index and reason."""
        good = b'["a",1]'
        for text in (
            b'["a"]',
            b"[]",
            b"{}",
            b"null",
            b'["a","1"]',
            b'["a",true]',
            b'["a",1.5]',
            b"[null,1]",
            b'["a",1,[2]]',
            b'["a",1',
            b'["a",NaN]',
            b'["\xff",1]',
            b"",
            b"[" * 100_000,
        ):
            error = self.assertRaises(RowDecodeError, CODEC.decode, [good, text, good])
            self.assertEqual((error.stream_name, error.index), ("things", 1), text)

    def test_wrong_values(self) -> None:
        """An invalid value raises an error with its stream, index and reason."""
        values: list[Any] = [None, {}, ["a"], ["a", "1"], "a"]
        for value in values:
            error = self.assertRaises(RowDecodeError, CODEC.from_json, value)
            self.assertEqual(error.stream_name, "things")

    def test_unsendable(self) -> None:
        """A row that JSON cannot encode raises a local error that names the stream."""
        row = Row("a", 1, None, float("nan"))
        error = self.assertRaises(LocalProtocolError, CODEC.encode, row)
        self.assertIn("things", str(error))

    def test_unwritable(self) -> None:
        """A row that cannot be written raises a local error with the field or type."""
        rows: list[tuple[Any, str]] = [
            (Row("a", 1, None, float("nan")), "data: NaN and Infinity are not JSON"),
            (Row("\ud800", 1, ["\ud800"]), "name, keys: text is not UTF-8"),
            (
                Row("a", 1, None, {"b": b"x"}),
                "data is dict (readers would receive another value); write a value of "
                "the declared type",
            ),
            (("a", 1), "it is tuple; write a Row"),
        ]
        for row, reason in rows:
            error = self.assertRaises(LocalProtocolError, CODEC.encode_new, row)
            self.assertEqual(str(error), f"a row of things cannot be written: {reason}")

    def test_no_rows(self) -> None:
        """An empty list is decoded to no rows."""
        self.assertEqual(CODEC.decode([]), DecodedRows([]))


class RawRowCodecTests(SynchronousTestCase):
    """``RawRowCodec``."""

    @settings(derandomize=True, deadline=None)
    @given(st.lists(JSON))
    def test_round_trip(self, values: list[Any]) -> None:
        """The JSON value itself is the row."""
        codec = RawRowCodec("things")
        texts = [codec.encode(value) for value in values]
        self.assertEqual(codec.decode(texts), DecodedRows(values))
        self.assertEqual([codec.from_json(codec.to_json(v)) for v in values], values)

    def test_unwritable(self) -> None:
        """A value that JSON cannot encode raises a local error."""
        codec = RawRowCodec("things")
        error = self.assertRaises(LocalProtocolError, codec.encode_new, [float("nan")])
        self.assertEqual(
            str(error),
            "a row of things cannot be written: NaN and Infinity are not JSON",
        )

    def test_wrong(self) -> None:
        """Text that is not JSON raises an error with stream and index."""
        error = self.assertRaises(
            RowDecodeError, RawRowCodec("things").decode, [b"1", b"NaN"]
        )
        self.assertEqual((error.stream_name, error.index), ("things", 1))


class FastClassTests(SynchronousTestCase):
    """``fast_class``."""

    def test_decoded_rows_are_as_made_by_the_class(self) -> None:
        """A decoded row equals one made by its class, and is hashable and frozen."""
        (row,) = AttrsRowCodec("pairs", Pair).decode([b'["a",1]']).rows
        self.assertIs(type(row), Pair)
        self.assertEqual(row, Pair("a", 1))
        self.assertEqual(hash(row), hash(Pair("a", 1)))
        with self.assertRaises(attrs.exceptions.FrozenInstanceError):
            row.name = "b"  # type: ignore[misc]

    def test_is_another_class(self) -> None:
        """A class that only assigns its fields has a faster replacement."""
        self.assertIsNot(fast_class(Pair), Pair)

    def test_init_that_does_more_is_called(self) -> None:
        """Converters, validators, hooks and a custom ``__init__`` are all called."""
        for row_type in (Converted, Validated, Hooked, CustomInit):
            self.assertIs(fast_class(row_type), row_type)
        rows: list[Any] = [
            AttrsRowCodec("rows", row_type).decode([b'["a"]']).rows[0]
            for row_type in (Converted, Hooked, CustomInit)
        ]
        self.assertEqual([row.name for row in rows], ["A", "hooked", "own a"])

    def test_validator(self) -> None:
        """A row that a validator rejects, by any exception, is a decoding error."""
        for row_type, reason in ((Validated, "not a"), (Unchecked, "KeyError|'a'")):
            codec: AttrsRowCodec[Any] = AttrsRowCodec("rows", row_type)
            with self.assertRaisesRegex(RowDecodeError, reason):
                codec.decode([b'["a"]'])
            with self.assertRaisesRegex(RowDecodeError, reason):
                codec.from_json(["a"])


@attrs.frozen
class Pair:
    """A row that is hashable."""

    name: str
    count: int


def _upper(value: str) -> str:
    return value.upper()


@attrs.frozen
class Converted:
    """A row with a converter."""

    name: str = attrs.field(converter=_upper)


def _refuse(row: object, field: object, value: str) -> None:
    raise ValueError(f"not {value}")


@attrs.frozen
class Validated:
    """A row with a validator."""

    name: str = attrs.field(validator=_refuse)


def _look_up(row: object, field: object, value: str) -> None:
    dict[str, str]()[value]


@attrs.frozen
class Unchecked:
    """A row whose validator raises another exception than ValueError."""

    name: str = attrs.field(validator=_look_up)


@attrs.define
class Hooked:
    """A row with a post-init hook."""

    name: str

    def __attrs_post_init__(self) -> None:
        self.name = "hooked"


@attrs.define
class CustomInit:
    """A row with a custom ``__init__``."""

    name: str

    def __init__(self, name: str) -> None:
        self.name = f"own {name}"
