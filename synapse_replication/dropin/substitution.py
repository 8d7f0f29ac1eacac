"""Putting our implementation in the place of a host's.

Theory of operation: a :class:`Substitution` names what stands where, and what its
callers rely on: how it is called, and its methods. :func:`check` compares that with
what is installed, without changing anything. :func:`substitute` then puts ours into
the module, and also wherever another module of the host took the old one by
``from ... import``: a host that is half swapped is worse than one that is not.

Nothing here knows which names there are; see ``table.py``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import attrs

from synapse_replication.errors import ReplicationError

__all__ = ["Substitution", "SubstitutionError", "check", "shape", "substitute"]


class SubstitutionError(ReplicationError):
    """What is installed is not what we know how to replace.

    :ivar problems: every difference that was found.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@attrs.frozen
class Substitution:
    """One name of the host, and what we put in its place.

    :ivar part: what it belongs to, for choosing.
    :ivar module: the host's module.
    :ivar name: the name in it.
    :ivar replacement: ours, as ``module:name``.
    :ivar shapes: the calls that we know, as :func:`shape` writes them; the host's
        must be one of them. Empty for a value that is not called.
    :ivar methods: the shapes of the methods that the host calls, without ``self``.
    :ivar extends: what ``replacement`` names is called with the host's own, and gives
        what takes its place.
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
        """Import ours, or have it made of the host's."""
        module, _, name = self.replacement.partition(":")
        ours = getattr(importlib.import_module(module), name)
        return ours(original) if self.extends else ours


def shape(function: Any, *, is_method: bool = False) -> str:
    """Write how something is called: names and kinds of parameters.

    Types and values of defaults are left out; that there is one is written ``=``.

    :param is_method: it is the function of a method: leave ``self`` out.
    """
    if isinstance(function, (staticmethod, classmethod)):
        is_method = isinstance(function, classmethod)
        function = function.__func__
    parameters = list(inspect.signature(function).parameters.values())
    if is_method:
        parameters = parameters[1:]
    words = []
    has_star = False
    for parameter in parameters:
        word = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            has_star = True
            word = f"*{word}"
        elif parameter.kind is parameter.VAR_KEYWORD:
            word = f"**{word}"
        elif parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            has_star = True
            words.append("*")
        if parameter.default is not parameter.empty:
            word += "="
        words.append(word)
    return f"({', '.join(words)})"


def check(substitutions: Iterable[Substitution]) -> list[str]:
    """Compare what is installed with what we know.

    :return: a text for each difference; none if all is well.
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
            problems.append(f"{substitution} is called as {found}, not {known}")
    for name, expected in substitution.methods.items():
        # getattr_static: neither bound nor a property's value.
        try:
            method = inspect.getattr_static(original, name)
        except AttributeError:
            problems.append(f"{substitution}.{name} is missing")
            continue
        if not (callable(method) or isinstance(method, (staticmethod, classmethod))):
            problems.append(f"{substitution}.{name} is no method")
        elif (found := shape(method, is_method=True)) != expected:
            problems.append(
                f"{substitution}.{name} is called as {found}, not {expected}"
            )
    return problems


def substitute(substitutions: Iterable[Substitution]) -> dict[str, Any]:
    """Put ours in place, after a check of all.

    :return: what stood there before, by dotted name.
    :raises SubstitutionError: if something is not as we know it; nothing was changed.
        Or some module still holds an original.
    """
    substitutions = list(substitutions)
    if problems := check(substitutions):
        raise SubstitutionError(problems)
    originals: dict[str, Any] = {}
    replaced: dict[int, tuple[Any, Any]] = {}
    loaded = []
    # All of ours first: an import that fails must change nothing.
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
