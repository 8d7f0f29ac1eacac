"""Declarations of options, from which all ways to set an option come.

An option is an attribute of an attrs class, with :func:`option` as its metadata: name,
type and default are those of the attribute, and its description is in the docstring of
the class. From this one declaration come the key of the configuration files, the
argument of the Python class, the environment variable and the flag of ``exec``, the
checks of all of them, and the entry in the manual's reference.

An attribute whose type is another class with options is a group: the keys of its
options lie below its own key.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final

import attrs

_METADATA: Final = "synapse_replication.option"

#: What to write as the value of a type.
TYPE_HINTS: Final[Mapping[type, str]] = types.MappingProxyType(
    {
        bool: "write true or false",
        int: "write a whole number, without quotes",
        float: "write a number",
        str: "write a text; in quotes if it looks like a number",
        list: "write a list: one line for each entry, beginning with `- `",
        dict: "write a mapping: indented `key: value` lines",
    }
)
#: The names of types in YAML and JSON.
_TYPE_NAMES: Final = {NoneType: "null", list: "array", dict: "object"}
_TRUE: Final = frozenset({"true", "1"})
_FALSE: Final = frozenset({"false", "0"})


class InvalidValueError(ValueError):
    """A value is invalid, or values do not fit together.

    :ivar problem: what is wrong.
    :ivar hint: what to do.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"{problem}; {hint}")
        self.problem = problem
        self.hint = hint


@attrs.frozen(eq=False)
class Option:
    """What the metadata of an attribute declares about an option.

    :ivar key: its key in the files, with dots between the steps; below the key of its
        group, if it belongs to one. If it is empty, the name of the attribute.
    :ivar minimum: the smallest number that is allowed.
    :ivar maximum: the largest number that is allowed.
    :ivar pattern: a regular expression that the whole text matches.
    :ivar hint: what to write; by default, it depends on the type.
    :ivar is_secret: whether the value must never be logged.
    :ivar variable: the name of its environment variable, without the prefix; by
        default, the last step of the key.
    :ivar switch: for a group that may be ``None``: a key, below that of the group, that
        is false if the value is ``None``. Its description is in :attr:`switch_meaning`.
    :ivar check: returns a value, normalised; raises :class:`InvalidValueError`.
    """

    key: str = ""
    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    hint: str = ""
    is_secret: bool = False
    variable: str = ""
    switch: str = ""
    switch_meaning: str = ""
    check: Callable[[Any], Any] | None = None

    def checked(self, value: Any) -> Any:
        """Return a value of the right type, normalised.

        :raises InvalidValueError: if the declaration does not allow it.
        """
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_range(value)
        if self.pattern is not None and not re.fullmatch(self.pattern, value):
            hint = self.hint or "write one word, without white space"
            raise InvalidValueError("is not of the required form", hint)
        return value if self.check is None else self.check(value)

    def _check_range(self, value: float) -> None:
        for bound, sign, is_good in (
            (self.minimum, ">=", self.minimum is None or value >= self.minimum),
            (self.maximum, "<=", self.maximum is None or value <= self.maximum),
        ):
            if not is_good:
                raise InvalidValueError(
                    f"expected `{type(value).__name__}` {sign} {bound}",
                    self.hint or "write a number in the range",
                )


def option(
    key: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    pattern: str | None = None,
    hint: str = "",
    is_secret: bool = False,
    variable: str = "",
    switch: str = "",
    switch_meaning: str = "",
    check: Callable[[Any], Any] | None = None,
) -> dict[str, Option]:
    """Return the metadata of an attribute that is an option; see :class:`Option`."""
    declared = Option(
        key,
        minimum,
        maximum,
        pattern,
        hint,
        is_secret,
        variable,
        switch,
        switch_meaning,
        check,
    )
    return metadata_of(declared)


def metadata_of(declared: Option) -> dict[str, Option]:
    """Return the metadata of an attribute that is the same option as another one."""
    return {_METADATA: declared}


def declared_option(attribute: attrs.Attribute[Any]) -> Option | None:
    """Return what an attribute declares; ``None`` if it is not an option."""
    found: Option | None = attribute.metadata.get(_METADATA)
    return found


@attrs.frozen(eq=False)
class Leaf:
    """An option that is no group, and where it lies in the tree of options.

    :ivar key: the steps of its key in the files.
    :ivar attributes: the attributes that lead to it from the root of the tree.
    :ivar type: its type.
    :ivar default: its default; ``attrs.NOTHING`` if it is required.
    :ivar option: what is declared about it.
    :ivar meaning: its description: one or more sentences, without markup of types.
    :ivar is_switch: whether it is the switch of a group, not an attribute.
    """

    key: tuple[str, ...]
    attributes: tuple[str, ...]
    type: Any
    default: Any
    option: Option
    meaning: str
    is_switch: bool = False

    @property
    def dotted(self) -> str:
        """The key, with dots between the steps."""
        return ".".join(self.key)

    @property
    def variable(self) -> str:
        """The environment variable."""
        name = self.option.variable or self.key[-1].upper()
        return f"SYNAPSE_REPLICATION_{name}"


def leaves(
    options: type[Any], key: tuple[str, ...] = (), attributes: tuple[str, ...] = ()
) -> Iterator[Leaf]:
    """Yield the options of a class and, in their place, those of its groups.

    :param key: the key of the group, if the class is one.
    :param attributes: the attributes that lead to the group.
    """
    kinds = typing.get_type_hints(options)
    meanings = descriptions(options)
    for attribute in attrs.fields(options):
        declared = declared_option(attribute)
        if declared is None:
            continue
        name, kind = attribute.name, kinds[attribute.name]
        inner = (*key, *(declared.key or name).split("."))
        path = (*attributes, name)
        group = _group(kind)
        if group is None:
            default = attribute.default
            if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
                default = None if default.takes_self else default.factory()
            yield Leaf(inner, path, kind, default, declared, meanings[name])
            continue
        if declared.switch:
            yield Leaf(
                (*inner, declared.switch),
                path,
                bool,
                True,
                declared,
                declared.switch_meaning,
                is_switch=True,
            )
        yield from leaves(group, inner, path)


def _group(kind: Any) -> type[Any] | None:
    """Return the class of a group, if a type is one, or one that may be ``None``."""
    parts = [part for part in typing.get_args(kind) if part is not NoneType]
    only = parts[0] if is_optional(kind) and len(parts) == 1 else kind
    if isinstance(only, type) and attrs.has(only):
        return only if any(map(declared_option, attrs.fields(only))) else None
    return None


def is_optional(kind: Any) -> bool:
    """Return whether a value of a type may be ``None``."""
    return NoneType in typing.get_args(kind)


def descriptions(options: type[Any]) -> dict[str, str]:
    """Return the descriptions of attributes in the docstrings of a class.

    Those of its base classes are included. Each begins with a capital letter.
    """
    found: dict[str, str] = {}
    for each in reversed(options.__mro__):
        described = re.findall(
            r":ivar (\w+): (.*?)(?=\n\s*:(?:ivar|raises|param) |\n\n|\Z)",
            each.__doc__ or "",
            re.DOTALL,
        )
        for name, text in described:
            joined = " ".join(text.split())
            found[name] = joined[:1].upper() + joined[1:]
    return found


def to_scalar(kind: type[Any], value: Any) -> Any:
    """Convert a value to a bool, int, float, text or path.

    Texts of numbers and of truth values are accepted: an environment variable is a
    text, and in a file, one may have quotes.

    :raises InvalidValueError: if it is not of this type.
    """
    found: Any = None
    if kind is Path:
        return Path(to_scalar(str, value))
    if type(value) is kind:
        return value
    if kind is bool and str(value).lower() in _TRUE | _FALSE:
        return str(value).lower() in _TRUE
    if kind in (int, float) and not isinstance(value, bool):
        try:
            found = kind(value)
        except (TypeError, ValueError, OverflowError):
            pass
        else:
            if kind is float or isinstance(value, str) or found == value:
                return found
    name = _TYPE_NAMES.get(type(value), type(value).__name__)
    raise InvalidValueError(
        f"expected `{kind.__name__}`, got `{name}`", TYPE_HINTS[kind]
    )


def find_invalid(options: Any) -> Iterator[tuple[tuple[str, ...], InvalidValueError]]:
    """Find the values that the declarations of their options do not allow.

    :param options: an object of a class with options.
    :return: the attributes that lead to each such value, and what is wrong with it.
    """
    for leaf in leaves(type(options)):
        value = options
        for name in leaf.attributes:
            value = None if value is None else getattr(value, name)
        if value is None or leaf.is_switch:
            continue
        try:
            if leaf.type in (bool, int, float, str):
                to_scalar(leaf.type, value)
            leaf.option.checked(value)
        except InvalidValueError as error:
            yield leaf.attributes, error


def build(options: type[Any], values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return the arguments of a class with options, its groups included.

    A group that may be ``None`` is left out if none of its options has a value, or if
    a required one has none.

    :param values: the values of leaves, by their keys; others have their defaults.
    """
    return _build(options, list(leaves(options)), values)


def _build(
    options: type[Any], found: Iterable[Leaf], values: Mapping[tuple[str, ...], Any]
) -> dict[str, Any]:
    """Return the arguments of a class.

    :param found: its leaves, with the attributes that lead to them from this class.
    """
    arguments: dict[str, Any] = {}
    groups: dict[str, list[Leaf]] = {}
    disabled: dict[str, None] = {}
    for leaf in found:
        name, *inner = leaf.attributes
        if inner:
            below = attrs.evolve(leaf, attributes=tuple(inner))
            groups.setdefault(name, []).append(below)
        elif leaf.key not in values:
            continue
        elif leaf.is_switch:
            disabled.update({} if values[leaf.key] else {name: None})
        else:
            arguments[name] = values[leaf.key]
    kinds = typing.get_type_hints(options)
    for name, below_it in groups.items():
        kind = _group(kinds[name])
        assert kind is not None, "only a group has leaves below it"
        inner_arguments = _build(kind, below_it, values)
        if inner_arguments and not _required(kind) - inner_arguments.keys():
            arguments[name] = kind(**inner_arguments)
    return {**arguments, **disabled}


def _required(options: type[Any]) -> set[str]:
    """Return the names of the options of a class that have no default."""
    return {
        attribute.name
        for attribute in attrs.fields(options)
        if declared_option(attribute) and attribute.default is attrs.NOTHING
    }
