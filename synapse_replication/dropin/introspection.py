"""Names and signatures of classes, as they are found at run time.

Theory of operation: a class shows its methods, properties and class attributes by
itself. The attributes that its methods store in an instance are found in their
bytecode: each is the name of an instruction that stores to the first parameter. The
names that a module defines, as opposed to those that it imports, are found in its
bytecode, too.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Final

#: The instructions after which the first parameter may be on top of the stack: the
#: versions of Python from 3.10 on differ.
_LOADS: Final = ("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")
_IMPORTS: Final = ("IMPORT_NAME", "IMPORT_FROM")

Parameter = inspect.Parameter


def public_names(cls: type) -> set[str]:
    """Return the public names of a class and of its instances, inherited ones too."""
    return {
        name
        for name in {*dir(cls), *instance_attributes(cls)}
        if not name.startswith("_")
    }


def instance_attributes(cls: type) -> set[str]:
    """Return the attributes that the methods of a class store in an instance."""
    return {
        name
        for base in cls.__mro__
        for member in vars(base).values()
        for function in _functions_of(member)
        for name in _stored_names(function.__code__)
    }


def _functions_of(member: object) -> Iterator[FunctionType]:
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, property):
        for accessor in (member.fget, member.fset, member.fdel):
            yield from _functions_of(accessor)
    elif isinstance(member, functools.cached_property):
        member = member.func
    if callable(member) and isinstance(found := inspect.unwrap(member), FunctionType):
        yield found


def _stored_names(code: CodeType) -> Iterator[str]:
    """Yield the attributes that a function stores in its first parameter."""
    if code.co_argcount:
        yield from _names_stored_in(code.co_varnames[0], code)


def _names_stored_in(variable: str, code: CodeType) -> Iterator[str]:
    loaded = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and loaded == variable:
            yield instruction.argval
        loaded = None
        if instruction.opname.startswith(_LOADS):
            # Some instructions have two variables, of which the second is on top.
            names = instruction.argval
            loaded = names[-1] if isinstance(names, tuple) else names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # A nested function has the variable of its enclosing function.
            yield from _names_stored_in(variable, constant)


def defined_names(module: str) -> set[str]:
    """Return the public names that a module defines itself.

    :param module: the dotted name of an importable module.
    :return: no names for a module without Python code.
    """
    spec = importlib.util.find_spec(module)
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code and get_code(module)
    if code is None:
        return set()
    names = set()
    is_imported = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_NAME" and not is_imported:
            names.add(instruction.argval)
        is_imported = instruction.opname in _IMPORTS
    return {name for name in names if not name.startswith("_")}


def signature_of(function: object, *, is_method: bool = False) -> inspect.Signature:
    """Return the names and kinds of the parameters, without annotations.

    :param is_method: whether ``function`` is a method, so that ``self`` is omitted.
    """
    if isinstance(function, (staticmethod, classmethod)):
        is_method = isinstance(function, classmethod)
        function = function.__func__
    if not callable(function):
        raise TypeError(f"{function!r} is not called")
    parameters = [
        Parameter(
            each.name,
            each.kind,
            default=each.empty if each.default is each.empty else _SOME_DEFAULT,
        )
        for each in inspect.signature(function).parameters.values()
    ]
    return inspect.Signature(parameters[1:] if is_method else parameters)


class _SomeDefault:
    """A default value in the text of a signature: there is one, whichever it is."""

    def __repr__(self) -> str:
        return ""


_SOME_DEFAULT: Final = _SomeDefault()


def admits(ours: inspect.Signature, theirs: inspect.Signature) -> bool:
    """Return whether calls of one signature are calls of another one.

    Arguments for parameters with a default are assumed to be passed by name.
    """
    own, given = ours.parameters, theirs.parameters
    kinds = {each.kind for each in own.values()}
    required = [name for name, each in given.items() if _is_required(each)]
    by_place = [name for name in required if given[name].kind is not _BY_NAME]
    return (
        all(each.kind in kinds for each in given.values() if each.kind in _VARIADIC)
        and all(name in required for name, each in own.items() if _is_required(each))
        and by_place == [n for n in own if own[n].kind in _BY_PLACE][: len(by_place)]
        and all(
            name in own or Parameter.VAR_KEYWORD in kinds
            for name, each in given.items()
            if each.kind not in _VARIADIC
        )
    )


_VARIADIC: Final = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_BY_NAME: Final = Parameter.KEYWORD_ONLY
_BY_PLACE: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in _VARIADIC
