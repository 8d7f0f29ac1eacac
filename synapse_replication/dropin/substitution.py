"""Replaces names in a host's modules with this package's implementations.

Theory of operation: a :class:`Substitution` describes a name of the host, its
signature, and the methods that its callers use. :func:`check` compares the description
with the installed host, whose modules it imports, and replaces nothing.
:func:`substitute` then replaces the name in its module, and in every module of the host
that imported it with ``from ... import``, so that the modules of the host do not use a
mixture of both implementations.

``replaced_names.py`` reads the names from ``replaced_names.csv``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from msgspec import Struct

from synapse_replication.errors import ReplicationError


class SubstitutionError(ReplicationError):
    """The selected parts of the installed host cannot be replaced.

    :ivar problems: the reasons.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class Substitution(Struct, frozen=True):
    """One name of the host and its replacement.

    :ivar part: the part of the host, selectable by an operator, that contains the name.
    :ivar module: the host's module.
    :ivar name: the name in that module.
    :ivar replacement: the replacement, as ``module:name``.
    :ivar shapes: the accepted signatures, in the format of :func:`shape`; empty for a
        value that is not called.
    :ivar methods: the signatures of the methods that the host calls, without ``self``.
    :ivar extends: whether ``replacement`` names a function that is called with the
        original object and returns the replacement.
    """

    part: str
    module: str
    name: str
    replacement: str
    shapes: tuple[str, ...] = ()
    methods: Mapping[str, str] = MappingProxyType({})
    extends: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def load_replacement(self, original: Any) -> Any:
        """Import the replacement; if :attr:`extends`, derive it from ``original``."""
        module, _, name = self.replacement.partition(":")
        ours = getattr(importlib.import_module(module), name)
        return ours(original) if self.extends else ours


def shape(function: Any, *, is_method: bool = False) -> str:
    """Return a signature as text: the names and kinds of its parameters.

    Annotations and default values are omitted; a default is indicated by ``=``.

    :param is_method: whether ``function`` is a method, so that ``self`` is omitted.
    """
    if isinstance(function, (staticmethod, classmethod)):
        is_method = isinstance(function, classmethod)
        function = function.__func__
    parameters = list(inspect.signature(function).parameters.values())
    if is_method:
        parameters = parameters[1:]
    names = []
    has_star = False
    for parameter in parameters:
        name = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            has_star = True
            name = f"*{name}"
        elif parameter.kind is parameter.VAR_KEYWORD:
            name = f"**{name}"
        elif parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            has_star = True
            names.append("*")
        if parameter.default is not parameter.empty:
            name += "="
        names.append(name)
    return f"({', '.join(names)})"


def check(substitutions: Iterable[Substitution]) -> list[str]:
    """Compare the installed host with the substitutions.

    :return: a description of each difference; empty if there is none.
    """
    problems = []
    for substitution in substitutions:
        problems += _check_one(substitution)
    return problems


def _check_one(substitution: Substitution) -> list[str]:
    try:
        module = importlib.import_module(substitution.module)
    except ImportError as error:
        return [f"{substitution} cannot be replaced: {error}"]
    original = getattr(module, substitution.name, None)
    if original is None:
        return [f"{substitution} is missing"]
    problems = []
    if substitution.shapes:
        found = shape(original)
        if found not in substitution.shapes:
            known = " or ".join(substitution.shapes)
            problems.append(f"{substitution} has the signature {found}, not {known}")
    for name, expected in substitution.methods.items():
        # getattr_static() neither binds methods nor evaluates properties.
        try:
            method = inspect.getattr_static(original, name)
        except AttributeError:
            problems.append(f"{substitution}.{name} is missing")
            continue
        if not (callable(method) or isinstance(method, (staticmethod, classmethod))):
            problems.append(f"{substitution}.{name} is not a method")
        elif (found := shape(method, is_method=True)) != expected:
            problems.append(
                f"{substitution}.{name} has the signature {found}, not {expected}"
            )
    return problems


def substitute(substitutions: Iterable[Substitution]) -> dict[str, Any]:
    """Check all substitutions, then apply them.

    :return: the original objects, by dotted name.
    :raises SubstitutionError: if the installed host differs; nothing is then changed.
    """
    substitutions = list(substitutions)
    if problems := check(substitutions):
        raise SubstitutionError(problems)
    originals: dict[str, Any] = {}
    replaced: dict[int, tuple[Any, Any]] = {}
    loaded = []
    # Import all replacements first, so that a failing import changes nothing.
    for known in substitutions:
        original = getattr(sys.modules[known.module], known.name)
        replacement = known.load_replacement(original)
        loaded.append((known, replacement))
        originals[str(known)] = original
        replaced[id(original)] = (original, replacement)
    roots = {known.module.partition(".")[0] for known in substitutions}
    for module in _modules_of(roots):
        for name, value in list(vars(module).items()):
            found = replaced.get(id(value))
            if found is not None and found[0] is value:
                setattr(module, name, found[1])
    for known, replacement in loaded:
        setattr(sys.modules[known.module], known.name, replacement)
    return originals


def _modules_of(roots: set[str]) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] in roots
    ]
