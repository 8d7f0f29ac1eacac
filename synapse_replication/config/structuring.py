"""Values of YAML files become typed values: :func:`read_value`.

cattrs creates the records; this module adds YAML's conventions (an empty section, a
text in place of a list of one), the checks that options declare, and the translation of
errors to problems with a source location and a hint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import attrs
from cattrs import BaseValidationError, Converter
from cattrs.errors import (
    AttributeValidationNote,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, override
from typing_extensions import override as overrides

from synapse_replication.config.yaml_files import KeyPath, MergedFiles, hint_for
from synapse_replication.options import (
    TYPE_HINTS,
    InvalidValueError,
    Option,
    declared_option,
    is_optional,
    to_scalar,
)

T = TypeVar("T")

#: The value of whatever is invalid; its problems have been reported.
INVALID: Final[Any] = object()


@attrs.frozen(repr=False)
class Section:
    """A section that Synapse defines: unknown keys are ignored."""

    @overrides
    def __repr__(self) -> str:
        # Without the values: some are secrets.
        return f"{type(self).__name__}(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the values that rich shows, for instance in a traceback: none."""
        return []


@attrs.frozen(repr=False)
class StrictSection(Section):
    """A section of this package: an unknown key is an error."""


@attrs.frozen(eq=False)
class _InvalidPart:
    """A part of a value that is invalid, and what is wrong with it.

    :ivar removes: the path of what must be left out for the rest to be valid.
    """

    path: KeyPath
    problem: str
    hint: str
    removes: KeyPath


def read_value(
    kind: Any,
    value: Any,
    path: KeyPath,
    merged: MergedFiles,
    declared: Option = Option(),  # noqa: B008 -- immutable
) -> Any:
    """Convert a value of the files to a type, and report everything that is invalid.

    A section of which a part is invalid has the default in its place. A list of which
    a part is invalid, and a section that lacks a key, are invalid as a whole.

    :param kind: an attrs class, or another type that an option may have.
    :param path: the path of the value.
    :param declared: what the option declares, if the value is that of one.
    :return: :data:`INVALID` if the value is invalid.
    """
    value, is_first = copy.deepcopy(value), True
    while True:
        try:
            return read_declared(kind, declared, value)
        except (InvalidValueError, BaseValidationError) as error:
            parts = list(_invalid_parts(error, (), kind))
        # Later, a section may be invalid only because of a default.
        for part in parts if is_first else ():
            merged.report((*path, *part.path), part.problem, part.hint)
        removed = [_remove(value, part.removes) for part in parts]
        if not any(removed):
            return INVALID
        is_first = False


def _invalid_parts(error: Any, path: KeyPath, kind: Any) -> Iterator[_InvalidPart]:
    """Yield the invalid parts that an error of cattrs, or of a hook, is about."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            steps: list[int | str] = []
            for note in getattr(inner, "__notes__", ()):
                if isinstance(note, AttributeValidationNote):
                    steps = [note.name]
                elif isinstance(note, IterableValidationNote):
                    steps = [note.index]
            yield from _invalid_parts(inner, (*path, *steps), error.cl)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = sorted(attribute.name for attribute in attrs.fields(error.cl))
        for key in sorted(error.extra_fields, key=str):
            inner_path = (*path, str(key))
            hint = hint_for(str(key), known)
            yield _InvalidPart(inner_path, "there is no such key", hint, inner_path)
    elif isinstance(error, KeyError):
        attribute = getattr(attrs.fields(kind), str(path[-1]))
        declared = declared_option(attribute)
        hint = declared.hint if declared and declared.hint else "add it"
        yield _InvalidPart(path, "is missing", hint, path[:-1])
    elif isinstance(error, InvalidValueError):
        yield _InvalidPart(path, error.problem, error.hint, path)
    else:
        raise error


def _remove(value: Any, path: KeyPath) -> bool:
    """Remove a part of a value: the list, if it is in a list.

    :return: whether something was removed: not if the part is the whole value.
    """
    steps: list[str] = []
    for step in path:
        if isinstance(step, int):
            break
        steps.append(step)
    if not steps or not isinstance(value, dict):
        return False
    for depth, step in enumerate(steps):
        key = next((key for key in value if str(key) == step), None)
        if key is None:
            # It was removed with another part.
            return False
        if depth == len(steps) - 1 or not isinstance(value[key], dict):
            del value[key]
            return True
        value = value[key]
    return False


def _structure_list(value: Any, kind: Any) -> Any:
    item = get_args(kind)[0]
    if value is None:
        value = []
    elif isinstance(value, str) and item is str:
        value = [value]
    if not isinstance(value, list):
        raise InvalidValueError("is not a list", TYPE_HINTS[list])
    found = _structure_each(
        enumerate(value), lambda each: _CONVERTER.structure(each, item), kind
    )
    return get_origin(kind)(each for _, each in found)


def _structure_mapping(value: Any, kind: Any) -> dict[str, Any]:
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise InvalidValueError("is not a mapping", TYPE_HINTS[dict])
    item = get_args(kind)[1]
    wrong = [key for key in value if not isinstance(key, str)]

    def structure(each: tuple[Any, Any]) -> Any:
        if each[0] in wrong:
            raise InvalidValueError("the key is not a text", "write the key in quotes")
        return each[1] if item is Any else _CONVERTER.structure(each[1], item)

    pairs = ((str(key), (key, each)) for key, each in value.items())
    return dict(_structure_each(pairs, structure, kind))


def _structure_each(
    items: Iterable[tuple[Any, Any]], structure: Callable[[Any], Any], kind: Any
) -> list[tuple[Any, Any]]:
    """Convert each item.

    :raises IterableValidationError: if any is invalid; it has all errors.
    """
    found, errors = [], []
    for index, item in items:
        try:
            found.append((index, structure(item)))
        except (InvalidValueError, BaseValidationError) as error:
            note = IterableValidationNote(f"At {index}", index, kind)
            notes = [*getattr(error, "__notes__", ()), note]
            error.__notes__ = notes  # type: ignore[union-attr]
            errors.append(error)
    if errors:
        raise IterableValidationError("entries are invalid", errors, kind)
    return found


def _structure_literal(value: Any, kind: Any) -> Any:
    if value in get_args(kind):
        return value
    what = value if isinstance(value, str) else type(value).__name__
    hint = f"write one of {', '.join(get_args(kind))}"
    raise InvalidValueError(f"invalid enum value {what!r}", hint)


def _record_hook(kind: type[Any], converter: Converter) -> Callable[[Any, Any], Any]:
    """Return the hook of an attrs class."""
    attrs.resolve_types(kind)
    hooks: dict[str, Any] = {
        attribute.name: override(struct_hook=_attribute_hook(attribute))
        for attribute in attrs.fields(kind)
        if attribute.init
    }
    make = make_dict_structure_fn(
        kind,
        converter,
        _cattrs_forbid_extra_keys=issubclass(kind, StrictSection),
        **hooks,
    )

    def structure(value: Any, _: Any) -> Any:
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise InvalidValueError("is not a mapping", TYPE_HINTS[dict])
        return make(value, kind)

    return structure


def _attribute_hook(attribute: attrs.Attribute[Any]) -> Callable[[Any, Any], Any]:
    is_required = attribute.default is attrs.NOTHING
    declared = declared_option(attribute) or Option()

    def structure(value: Any, kind: Any) -> Any:
        if value is None and is_required:
            raise InvalidValueError("is empty", declared.hint or "write a value")
        return read_declared(kind, declared, value)

    return structure


def read_declared(kind: Any, declared: Option, value: Any) -> Any:
    """Convert the value of an option, and check what the option declares.

    :raises InvalidValueError: if the value is invalid.
    :raises BaseValidationError: if parts of it are invalid.
    """
    if value is None and is_optional(kind):
        return None
    try:
        found = _CONVERTER.structure(value, kind)
    except InvalidValueError as error:
        if declared.hint and error.hint not in (TYPE_HINTS[list], TYPE_HINTS[dict]):
            raise InvalidValueError(error.problem, declared.hint) from None
        raise
    return declared.checked(found)


def add_hook(kind: Any, structure: Callable[[Any], Any]) -> None:
    """Set the function that converts values to a type.

    :param structure: raises :class:`InvalidValueError` for an invalid value.
    """
    _CONVERTER.register_structure_hook_func(
        lambda each: bool(each == kind), lambda value, _: structure(value)
    )


def _is_generic(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) in origins


def _make_converter() -> Converter:
    converter = Converter(detailed_validation=True)
    for scalar in (bool, int, float, str, Path):
        converter.register_structure_hook(
            scalar, lambda value, kind: to_scalar(kind, value)
        )
    for predicate, hook in (
        (_is_generic(list, tuple), _structure_list),
        (_is_generic(dict, Mapping), _structure_mapping),
        (_is_generic(Literal), _structure_literal),
    ):
        converter.register_structure_hook_func(predicate, hook)
    converter.register_structure_hook_factory(attrs.has)(
        lambda kind, converter: _record_hook(kind, converter)
    )
    return converter


_CONVERTER: Final = _make_converter()
