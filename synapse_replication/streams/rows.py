"""Typed rows: from JSON text to slotted attrs classes and back.

Theory of operation: a row on the wire is a JSON array whose elements are the fields of
an attrs class, in order. :class:`AttrsRowCodec` creates one decoder per class, for the
tuple of the fields' types, so that text is parsed and validated in one pass in C. The
row is then made from the values by the class that :func:`fast_class` returns. If a row
does not match, which is rare, the rows are decoded again without types. In this second
pass, additional fields of a newer peer's row are dropped, and the row is counted.
Missing last fields receive their defaults. A row that still does not match is invalid.
"""

from __future__ import annotations

import math
import operator
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Protocol

import attrs
import msgspec
from msgspec import Struct
from typing_extensions import TypeVar

from synapse_replication.errors import LocalProtocolError, RowDecodeError
from synapse_replication.streams.tokens import MAX_TOKEN, MIN_TOKEN

#: The type of the rows of a stream; not known by default.
RowT = TypeVar("RowT", default=Any)

#: The longest JSON text of a row that may be written, in bytes: the longest message
#: that peers accept.
MAX_ROW_LENGTH = 16 * 1024 * 1024
#: The longest JSON text of the rows of one token of a stream that is held in memory, in
#: bytes. They are sent in one response, because a token is never split.
MAX_BATCH_LENGTH = 32 * 1024 * 1024
#: The most JSON values of one response; see :func:`count_values`. To decode them takes
#: about 0.2 s and 40 MiB.
MAX_VALUES = 500_000
#: The values that a row takes in a response, in addition to its own.
VALUES_PER_ROW = 3
#: The bytes that a row takes in a response, in addition to its text: at most 19 digits
#: of a token, brackets and commas.
BYTES_PER_ROW = 24

_decode_any = msgspec.json.Decoder().decode
_encode_any = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines
_BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_json(text: bytes | str) -> Any:
    """Decode strict JSON: no NaN or Infinity, nothing after the value.

    :raises ValueError: if it is not JSON. The message does not quote the text.
    """
    try:
        return _decode_any(text)
    except (*_BAD_JSON, UnicodeEncodeError) as error:
        raise ValueError(_describe(error)) from None


def encode_json(value: Any, nones: int | None = None) -> bytes:
    """Encode as compact JSON in UTF-8.

    :param nones: the number of ``None`` in the value, if known, which saves counting.
    :raises ValueError: if the value contains NaN, Infinity, a lone surrogate or an
        unsupported type, or is nested too deeply.
    """
    try:
        text = _encode_any(value)
        # The encoder writes NaN and Infinity as null.
        nulls = text.count(b"null")
        if (
            nulls
            and nulls != nones
            # If there are as many nulls as Nones, no null was NaN.
            and nulls != _count_nones(value)
            and _contains_non_finite(value)
        ):
            raise ValueError("NaN and Infinity are not JSON")
    except (msgspec.MsgspecError, TypeError, UnicodeEncodeError, RecursionError) as e:
        raise ValueError(_describe(e)) from None
    return text


def encode_json_rows(values: Sequence[Any]) -> list[bytes]:
    """Encode several values in one call, each as :func:`encode_json` does.

    :raises ValueError: if a value cannot be encoded.
    """
    try:
        text = _encode_lines(values)
    except (msgspec.MsgspecError, TypeError, UnicodeEncodeError, RecursionError) as e:
        raise ValueError(_describe(e)) from None
    texts = text.split(b"\n")
    # Encoded JSON contains no newline; the last value is followed by one.
    del texts[-1]
    if text.count(b"null") != sum(map(_count_nones, values)):
        # Rare: a NaN, a string that contains "null", or a None that _count_nones()
        # does not count.
        return list(map(encode_json, values))
    return texts


def compact_json_rows(texts: Sequence[bytes | str]) -> list[bytes]:
    """Encode rows that are JSON again, as :func:`encode_json` does.

    It is faster than :func:`encode_json_rows`: JSON has no NaN.

    :raises ValueError: if a text is not valid JSON.
    """
    return _encode_lines(list(map(decode_json, texts))).split(b"\n")[:-1]


def _count_nones(value: Any) -> int:
    """Count ``None`` in a row and in arrays directly inside it, but no deeper."""
    if type(value) is not list and type(value) is not tuple:
        return 0
    count: int = value.count(None)
    for inner in value:
        if type(inner) is list or type(inner) is tuple:
            count += inner.count(None)
    return count


def _contains_non_finite(value: Any) -> bool:
    values = [value]
    for inner in values:
        kind = type(inner)
        if kind is str or inner is None:
            continue
        if kind is list or kind is tuple:
            values += inner
        elif kind is dict:
            values += inner.values()
        elif isinstance(inner, float) and not math.isfinite(inner):
            return True
    return False


def _describe(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "JSON is nested too deeply"
    if isinstance(error, UnicodeError):
        return "text is not UTF-8"
    return str(error)


def count_values(text: bytes) -> int:
    """Return an upper bound of the number of values in JSON text, but one.

    It is the number of commas and opening brackets, including those in strings, which
    are counted without decoding anything.
    """
    return text.count(b",") + text.count(b"[") + text.count(b"{")


class DecodedRows(Struct, Generic[RowT]):
    """Decoded rows.

    :ivar rows: the rows, in the order of the texts.
    :ivar with_extra_fields: the number of rows from a newer peer whose unknown last
        fields were skipped.
    """

    rows: list[RowT]
    with_extra_fields: int = 0


def fast_class(row_type: type[RowT]) -> type[RowT]:
    """Return a subclass whose instances are initialised quickly and then become rows.

    Use it like this::

        row = fast(*fields)
        row.__class__ = row_type

    A frozen attrs class forbids assignment and therefore sets each field by a function
    call, which takes three times as long as decoding the fields. The subclass has the
    same slots but allows assignment. If the ``__init__`` of ``row_type`` does more than
    assign fields, ``row_type`` itself is returned.
    """
    fields = attrs.fields(row_type)  # type: ignore[arg-type]
    if (
        any(f.converter or f.validator or f.kw_only or not f.init for f in fields)
        or any(hasattr(row_type, name) for name in _MORE_THAN_ASSIGNING)
        or "__init_subclass__" in vars(row_type)
    ):
        return row_type
    assigning = attrs.make_class(row_type.__name__, [f.name for f in fields])
    made: type[RowT] = type(
        row_type.__name__,
        (row_type,),
        {
            "__slots__": (),
            "__init__": vars(assigning)["__init__"],
            "__setattr__": object.__setattr__,
            "__delattr__": object.__delattr__,
        },
    )
    return made


_MORE_THAN_ASSIGNING = (
    "__attrs_init__",  # there is an __init__ that attrs did not write
    "__attrs_pre_init__",
    "__attrs_post_init__",
    "_attrs_cached_hash",
)


class RowCodec(Protocol[RowT]):
    """Encoder and decoder of a stream's typed rows."""

    @property
    def row_type(self) -> Callable[..., RowT]:
        """The function or class that makes a row from its fields."""

    def decode(self, texts: Sequence[bytes | str]) -> DecodedRows[RowT]:
        """Decode several rows.

        :raises RowDecodeError: if one of them is not a row of this stream.
        """

    def from_json(self, value: Any) -> RowT:
        """Return the row for a JSON value, for instance one fetched in a catch-up.

        :raises RowDecodeError: if the value is not a row of this stream.
        """

    def to_json(self, row: RowT) -> Any:
        """Return the JSON value of a row."""

    def encode(self, row: RowT) -> bytes:
        """Return the JSON text of a row.

        :raises LocalProtocolError: if the row cannot be encoded as JSON.
        """

    def encode_new(self, row: RowT) -> bytes:
        """Return the JSON text of a row that is about to be written.

        :raises LocalProtocolError: if the row cannot be encoded as JSON, or is longer
            than :data:`MAX_ROW_LENGTH`, or if readers would receive another value.
        """


class CheckedRowCodec(ABC, Generic[RowT]):
    """Base class of codecs, which reports what is wrong with a row.

    :param stream_name: the stream, for error messages.
    :param row_type: makes a row from its fields; usually the class of the rows.
    """

    def __init__(self, stream_name: str, row_type: Callable[..., RowT]) -> None:
        self.stream_name = stream_name
        self.row_type = row_type

    @abstractmethod
    def to_json(self, row: RowT) -> Any:
        """Return the JSON value of a row."""

    @abstractmethod
    def parse(self, value: Any) -> tuple[RowT, bool]:
        """Return the row for a JSON value, and whether it has unknown fields.

        It may raise anything if the value is not a row of this stream.
        """

    @abstractmethod
    def _encode(self, row: RowT) -> bytes:
        """Return the JSON text of a row.

        :raises ValueError: if the row cannot be encoded as JSON.
        :raises AttributeError: if it is no row of this stream.
        """

    def decode(self, texts: Sequence[bytes | str]) -> DecodedRows[RowT]:
        """Decode several rows.

        :raises RowDecodeError: if one of them is not a row of this stream.
        """
        rows = []
        extra = 0
        for index, text in enumerate(texts):
            try:
                value = decode_json(text)
                row, more = self.parse(value)
            except Exception as error:  # noqa: BLE001 -- a row type's validators may raise anything
                raise self._error(index, error) from None
            rows.append(row)
            extra += more
        return DecodedRows(rows, extra)

    def from_json(self, value: Any) -> RowT:
        """Return the row for a JSON value, for instance one fetched in a catch-up.

        :raises RowDecodeError: if the value is not a row of this stream.
        """
        try:
            return self.parse(value)[0]
        except Exception as error:  # noqa: BLE001 -- see decode()
            raise self._error(0, error) from None

    def _error(self, index: int, error: Exception) -> RowDecodeError:
        reason = str(error) or type(error).__name__
        return RowDecodeError(self.stream_name, index, reason)

    def encode(self, row: RowT) -> bytes:
        """Return the JSON text of a row.

        :raises LocalProtocolError: if the row cannot be encoded as JSON.
        """
        try:
            return self._encode(row)
        except ValueError as error:
            raise LocalProtocolError(
                f"a row of {self.stream_name} cannot be sent: {error}"
            ) from None

    def encode_new(self, row: RowT) -> bytes:
        """Return the JSON text of a row that is about to be written.

        :raises LocalProtocolError: if the row cannot be encoded as JSON, or is longer
            than :data:`MAX_ROW_LENGTH`, or if readers would receive another value.
        """
        try:
            text = self._encode(row)
        except AttributeError:
            raise LocalProtocolError(
                f"a row of {self.stream_name} cannot be written: it is "
                f"{type(row).__name__}; write a {self.row_type.__name__}"
            ) from None
        except ValueError as error:
            raise LocalProtocolError(
                f"a row of {self.stream_name} cannot be written: "
                f"{self._unencodable_fields(row)}{error}"
            ) from None
        if len(text) > MAX_ROW_LENGTH:
            raise LocalProtocolError(
                f"a row of {self.stream_name} has {len(text)} bytes as JSON, more than "
                f"the {MAX_ROW_LENGTH} that peers accept; write smaller rows"
            )
        self._check_round_trip(row, text)
        return text

    def _unencodable_fields(self, row: RowT) -> str:
        """Name the fields that cannot be encoded, as the beginning of a message."""
        return ""

    def _check_round_trip(self, row: RowT, text: bytes) -> None:
        """Check that readers receive the same row.

        :raises LocalProtocolError: if they would not.
        """
        try:
            if self.decode([text]).rows == [row]:
                return
            reason = "readers would receive another value"
        except RowDecodeError as error:
            reason = f"readers would reject it: {error.reason}"
        raise LocalProtocolError(
            f"a row of {self.stream_name} cannot be written: {reason}"
        )


#: An integer as PostgreSQL's bigint stores it.
_Integer = Annotated[int, msgspec.Meta(ge=MIN_TOKEN, le=MAX_TOKEN)]


def _bounded(hint: Any) -> Any:
    """Return the type of a field for decoding: integers have 64 bits."""
    if hint is int:
        return _Integer
    return _Integer | None if hint == (int | None) else hint


class AttrsRowCodec(CheckedRowCodec[RowT]):
    """Codec of rows that are arrays of the fields of a class.

    :param stream_name: the stream, for error messages.
    :param row_type: an attrs class whose fields are the elements of the array. Fields
        with a default may be missing at the end of the array.
    """

    def __init__(self, stream_name: str, row_type: type[RowT]) -> None:
        super().__init__(stream_name, row_type)
        hints = typing.get_type_hints(row_type)
        fields = attrs.fields(row_type)  # type: ignore[arg-type]
        # In older attrs, classes made by make_class have no annotations.
        types = tuple(_bounded(hints.get(field.name, field.type)) for field in fields)
        self.types = tuple.__class_getitem__(types)
        self.fast_class: Callable[..., RowT] = fast_class(row_type)
        self._names = [field.name for field in fields]
        self._field_types = types
        self.fields_of = _fields_getter(self._names)
        self._most = len(types)
        self._least = sum(field.default is attrs.NOTHING for field in fields)
        self._decode: Callable[[bytes | str], Any] = msgspec.json.Decoder(
            self.types
        ).decode
        self._by_length = {
            n: tuple.__class_getitem__(types[:n])
            for n in range(self._least, self._most + 1)
        }

    def decode(self, texts: Sequence[bytes | str]) -> DecodedRows[RowT]:
        """Decode several rows.

        :raises RowDecodeError: if one of them is not a row of this stream.
        """
        row_type, fast, decode = self.row_type, self.fast_class, self._decode
        rows = []
        try:
            if fast is row_type:
                return DecodedRows([row_type(*decode(text)) for text in texts])
            for text in texts:
                row = fast(*decode(text))
                row.__class__ = row_type  # type: ignore[assignment]
                rows.append(row)
        except Exception:  # noqa: BLE001 -- a row type's validators may raise anything
            return super().decode(texts)
        return DecodedRows(rows)

    def parse(self, value: Any) -> tuple[RowT, bool]:
        """Return the row for a JSON value, and whether it has unknown fields."""
        if not isinstance(value, list):
            raise ValueError("a row must be a JSON array")
        known = value[: self._most]
        if len(known) < self._least:
            raise ValueError(
                f"a row must have at least {self._least} fields, but this one has "
                f"{len(known)}"
            )
        fields = msgspec.convert(known, self._by_length[len(known)])
        return self.row_type(*fields), len(value) > self._most

    def to_json(self, row: RowT) -> Any:
        """Return the JSON value of a row."""
        return list(self.fields_of(row))

    def _unencodable_fields(self, row: RowT) -> str:
        """Name the fields that cannot be encoded, as the beginning of a message."""
        names = []
        for name, value in zip(self._names, self.fields_of(row), strict=True):
            try:
                encode_json(value)
            except ValueError:
                names.append(name)
        return f"{', '.join(names)}: " if names else ""

    def _check_round_trip(self, row: RowT, text: bytes) -> None:
        fields = self.fields_of(row)
        # Usually, no row need be made of the values.
        try:
            is_same = self._decode(text) == fields
        except msgspec.ValidationError:
            is_same = False
        if is_same:
            return
        try:
            if self.fields_of(self.decode([text]).rows[0]) == fields:
                return
        except RowDecodeError as error:
            reason = error.reason
        else:
            reason = ""
        for name, type_, value in zip(
            self._names, self._field_types, fields, strict=True
        ):
            try:
                received = msgspec.convert(decode_json(encode_json(value)), type_)
                if received == value:
                    continue
                is_nested = type(received) is type(value)
                other = "another value" if is_nested else type(received).__name__
                reason = f"readers would receive {other}"
            except msgspec.ValidationError as error:
                reason = str(error).partition(" - at")[0].lower()
            raise LocalProtocolError(
                f"a row of {self.stream_name} cannot be written: {name} is "
                f"{type(value).__name__} ({reason}); write a value of the declared type"
            )
        raise LocalProtocolError(
            f"a row of {self.stream_name} cannot be written: readers would reject it"
            + (f": {reason}" if reason else "")
        )

    def _encode(self, row: RowT) -> bytes:
        fields = self.fields_of(row)
        return encode_json(fields, fields.count(None))


def _fields_getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda row: tuple(getattr(row, name) for name in names)


class RawRowCodec(CheckedRowCodec[Any]):
    """Codec of untyped rows: the row is the JSON value itself."""

    def __init__(self, stream_name: str) -> None:
        super().__init__(stream_name, self.to_json)

    def decode(self, texts: Sequence[bytes | str]) -> DecodedRows[Any]:
        """Decode several rows.

        :raises RowDecodeError: if one of them is not JSON.
        """
        rows = []
        for index, text in enumerate(texts):
            try:
                rows.append(decode_json(text))
            except ValueError as error:
                raise RowDecodeError(self.stream_name, index, str(error)) from None
        return DecodedRows(rows)

    def parse(self, value: Any) -> tuple[Any, bool]:
        """Return the value itself."""
        return value, False

    def to_json(self, row: Any) -> Any:
        """Return the value itself."""
        return row

    def _encode(self, row: Any) -> bytes:
        return encode_json(row)

    def _check_round_trip(self, row: Any, text: bytes) -> None:
        """Do nothing: readers receive any JSON value."""
