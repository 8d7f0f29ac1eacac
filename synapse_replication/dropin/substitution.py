"""The names of Synapse that this package replaces, and their replacement.

Theory of operation: each row of ``replaced_names.csv`` is a :class:`Substitution`: a
name of the host, its signature, and the methods that its callers use, as they were read
from installed packages. A row belongs to a part of the host, which an operator can
select. :func:`check` compares rows with the installed host, whose modules it imports,
and replaces nothing. :func:`substitute` then replaces the name in its module, and in
every module of the host that imported it with ``from ... import``, so that the modules
of the host do not use a mixture of both implementations.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from msgspec import Struct

from synapse_replication.data_files import read_table
from synapse_replication.errors import ReplicationError

#: The distribution that the table describes.
DISTRIBUTION: Final = "matrix-synapse"

#: The versions of matrix-synapse with which the table was tested.
TESTED_VERSIONS: Final = ("1.153.0", "1.163.0", "1.163.1", "1.163.2")


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


def _read_substitution(row: Mapping[str, str]) -> Substitution:
    """Return a substitution; the names are relative to ``synapse`` and this package."""
    module, _, name = row["Name"].partition(":")
    signatures = row["Signatures"].splitlines()
    # Signatures that begin with a name are those of methods.
    methods = [each for each in signatures if not each.startswith("(")]
    return Substitution(
        part=row["Part"],
        module=f"synapse.{module}",
        name=name,
        replacement=f"synapse_replication.{row['Replacement']}",
        shapes=tuple(each for each in signatures if each not in methods),
        methods={each[: each.index("(")]: each[each.index("(") :] for each in methods},
        extends=row["Extends"] == "yes",
    )


SUBSTITUTIONS: Final = tuple(
    map(_read_substitution, read_table(Path(__file__).with_name("replaced_names.csv")))
)

#: The parts that an operator can select. The manual describes them.
PARTS: Final = tuple(dict.fromkeys(known.part for known in SUBSTITUTIONS))


def choose(only: Iterable[str], excepted: Iterable[str]) -> tuple[Substitution, ...]:
    """Return the substitutions of the selected parts.

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
    parts = (only or set(PARTS)) - excepted
    if not parts:
        raise SubstitutionError(["every part is excluded: nothing would be replaced"])
    return tuple(known for known in SUBSTITUTIONS if known.part in parts)


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


class _SomeDefault:
    """A default value in the text of a signature: there is one, whichever it is."""

    def __repr__(self) -> str:
        return ""


def shape(function: Any, *, is_method: bool = False) -> str:
    """Return a signature as text: the names and kinds of its parameters.

    Annotations and default values are omitted; a default is indicated by ``=``.

    :param is_method: whether ``function`` is a method, so that ``self`` is omitted.
    """
    if isinstance(function, (staticmethod, classmethod)):
        is_method = isinstance(function, classmethod)
        function = function.__func__
    parameters = [
        inspect.Parameter(
            each.name,
            each.kind,
            default=each.empty if each.default is each.empty else _SomeDefault(),
        )
        for each in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters[1:] if is_method else parameters))


def check(substitutions: Iterable[Substitution]) -> list[str]:
    """Compare the installed host with the substitutions.

    :return: a description of each difference; empty if there is none.
    """
    return [problem for known in substitutions for problem in _check_one(known)]


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
    # By the id of the original, which is unique as long as the original is retained.
    replacements: dict[int, Any] = {}
    # Import all replacements first, so that a failing import changes nothing.
    for known in substitutions:
        original = getattr(sys.modules[known.module], known.name)
        originals[str(known)] = original
        replacements[id(original)] = known.load_replacement(original)
    roots = {known.module.partition(".")[0] for known in substitutions}
    for path, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and path.partition(".")[0] in roots:
            for name, value in list(vars(module).items()):
                if id(value) in replacements:
                    setattr(module, name, replacements[id(value)])
    return originals
