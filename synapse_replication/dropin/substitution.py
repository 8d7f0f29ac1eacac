"""Comparing the installed homeserver with this package, and replacing its names.

Theory of operation: a :class:`Substitution` is a name of the host and the object that
replaces it; ``replaced_names.py`` lists them. A substitution belongs to a part of the
host, which an operator can select. :func:`find_problems` imports the host's modules,
compares every public name of what is replaced with the replacement, and replaces
nothing:

- the signature, and for a class its methods and their signatures, which of them are
  coroutines, its attributes, and those that its methods store in an instance;
- in a module of which all public names are replaced or known, the names themselves.

A difference is a problem unless the substitution states why nobody needs that name.
:func:`substitute` then replaces the name in its module, and in every module of the host
that imported it with ``from ... import``, so that the modules of the host do not use a
mixture of both implementations.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final, Literal, get_args

import attrs

from synapse_replication.dropin.introspection import (
    admits,
    defined_names,
    public_names,
    signature_of,
)
from synapse_replication.errors import ReplicationError

#: The distribution that is replaced in part.
DISTRIBUTION: Final = "matrix-synapse"

#: The versions of matrix-synapse that were compared and tested.
TESTED_VERSIONS: Final = ("1.153.0", "1.163.0", "1.163.1", "1.163.2")

#: The parts that an operator can select. The manual describes them.
Part = Literal[
    "commands",
    "protocol",
    "handler",
    "notifier",
    "redis",
    "backlog",
    "external_cache",
    "ids",
]
PARTS: Final[tuple[Part, ...]] = get_args(Part)


class SubstitutionError(ReplicationError):
    """The selected parts of the installed host cannot be replaced.

    :ivar problems: the reasons.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def _split(names: str) -> frozenset[str]:
    return frozenset(names.split())


@attrs.frozen
class Difference:
    """Public names of the host that the replacement lacks, or has otherwise.

    :ivar names: given as one string, separated by spaces.
    :ivar reason: why nobody needs these names, or why the difference is of no
        consequence.
    """

    names: frozenset[str] = attrs.field(converter=_split)
    reason: str = attrs.field(validator=attrs.validators.min_len(1))


@attrs.frozen
class Substitution:
    """One name of the host and its replacement.

    :ivar part: the part of the host, selectable by an operator, that contains the name.
    :ivar module: the host's module.
    :ivar name: the name in that module.
    :ivar replacement: the object that replaces it.
    :ivar extends: whether ``replacement`` is instead a function that is called with the
        original class and returns a subclass.
    :ivar differences: the accepted differences.
    """

    part: Part
    module: str
    name: str
    replacement: Callable[..., Any]
    extends: bool = False
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def location(self) -> str:
        """The module and the name of the replacement, for display."""
        return f"{self.replacement.__module__}:{self.replacement.__qualname__}"

    def replacement_for(self, original: object) -> Any:
        """Return the replacement; if :attr:`extends`, derive it from ``original``."""
        return self.replacement(original) if self.extends else self.replacement


def choose(only: Iterable[str], excepted: Iterable[str]) -> tuple[Part, ...]:
    """Return the parts that an operator has selected.

    :param only: the parts to replace; all if empty.
    :param excepted: the parts that are not replaced.
    :raises SubstitutionError: if a part does not exist, or no part is selected.
    """
    only, excepted = set(only), set(excepted)
    if unknown := sorted((only | excepted) - set(PARTS)):
        known = ", ".join(PARTS)
        raise SubstitutionError(
            [f"there is no part {', '.join(unknown)}; the parts are {known}"]
        )
    selected = (only or set(PARTS)) - excepted
    if not selected:
        raise SubstitutionError(["every part is excluded: nothing would be replaced"])
    return tuple(part for part in PARTS if part in selected)


def installed_version() -> str | None:
    """Return the installed version of Synapse; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_problem(version: str | None) -> str | None:
    """Return why a version counts as untested; ``None`` if it was tested."""
    tested = ", ".join(TESTED_VERSIONS)
    if version is None:
        return f"{DISTRIBUTION} is not installed in the environment of {sys.executable}"
    if version not in TESTED_VERSIONS:
        return (
            f"{DISTRIBUTION} {version} was not tested; the tested versions are {tested}"
        )
    return None


# -- comparing ----------------------------------------------------------------------


def find_problems(
    substitutions: Iterable[Substitution],
    modules: Mapping[str, Iterable[Difference]],
) -> list[str]:
    """Compare the installed host with the substitutions.

    :param modules: the modules of which all public names are known, each with the names
        that are not replaced.
    :return: a description of each difference; empty if there is none.
    """
    substitutions = list(substitutions)
    problems = [problem for known in substitutions for problem in _problems_of(known)]
    replaced: dict[str, set[str]] = {}
    for known in substitutions:
        replaced.setdefault(known.module, set()).add(known.name)
    for module, unreplaced in modules.items():
        if module in replaced and module in sys.modules:
            known_names = replaced[module].union(*(each.names for each in unreplaced))
            problems += [
                f"{module}.{name} is not known to synapse_replication, which replaces "
                f"this module"
                for name in sorted(defined_names(module) - known_names)
            ]
    return problems


def _problems_of(substitution: Substitution) -> Iterator[str]:
    try:
        module = importlib.import_module(substitution.module)
    except ImportError as error:
        yield f"{substitution} cannot be replaced: {error}"
        return
    original = getattr(module, substitution.name, None)
    if original is None:
        yield f"{substitution} is missing"
        return
    ours = substitution.replacement_for(original)
    accepted = frozenset[str]().union(
        *(each.names for each in substitution.differences)
    )
    if problem := _signature_problem(original, ours):
        yield f"{substitution} {problem}"
    if isinstance(original, type):
        own_names = public_names(ours)
        for name in sorted(public_names(original) - accepted):
            if name not in own_names:
                yield f"{substitution}.{name} is missing in {substitution.location}"
            elif problem := _member_problem(original, ours, name):
                yield f"{substitution}.{name} {problem}"


def _member_problem(original: type, ours: type, name: str) -> str | None:
    """Return how a member of a class differs from ours; ``None`` if it does not."""
    # getattr_static() neither binds methods nor evaluates properties.
    theirs = inspect.getattr_static(original, name, None)
    own = inspect.getattr_static(ours, name, None)
    if _is_method(theirs) != _is_method(own):
        is_, is_not = ("", "not ") if _is_method(theirs) else ("not ", "")
        return f"is {is_}a method, and is {is_not}one in synapse_replication"
    if not _is_method(theirs):
        return None
    if _is_coroutine(theirs) != _is_coroutine(own):
        return "is a coroutine function only in one of both"
    return _signature_problem(theirs, own, is_method=True)


def _signature_problem(
    theirs: object, own: object, *, is_method: bool = False
) -> str | None:
    found = signature_of(theirs, is_method=is_method)
    expected = signature_of(own, is_method=is_method)
    if admits(expected, found):
        return None
    return f"has the signature {found}, not {expected}"


def _is_method(member: object) -> bool:
    return isinstance(member, (FunctionType, staticmethod, classmethod))


def _is_coroutine(member: object) -> bool:
    return inspect.iscoroutinefunction(getattr(member, "__func__", member))


# -- replacing ----------------------------------------------------------------------


def substitute(
    substitutions: Iterable[Substitution],
    modules: Mapping[str, Iterable[Difference]],
) -> dict[str, object]:
    """Check all substitutions, then apply them.

    :param modules: as for :func:`find_problems`.
    :return: the original objects, by dotted name.
    :raises SubstitutionError: if the installed host differs; nothing is then changed.
    """
    substitutions = list(substitutions)
    if problems := find_problems(substitutions, modules):
        raise SubstitutionError(problems)
    originals: dict[str, object] = {}
    # By the id of the original, which is unique as long as the original is retained.
    replacements: dict[int, object] = {}
    for known in substitutions:
        original = getattr(sys.modules[known.module], known.name)
        originals[str(known)] = original
        replacements[id(original)] = known.replacement_for(original)
    roots = {known.module.partition(".")[0] for known in substitutions}
    for path, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and path.partition(".")[0] in roots:
            for name, value in list(vars(module).items()):
                if id(value) in replacements:
                    setattr(module, name, replacements[id(value)])
    return originals
