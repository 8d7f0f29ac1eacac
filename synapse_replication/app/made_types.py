"""The type that a function returns, found in its source."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import CoroutineType, NoneType
from typing import Any


def find_made_types(factory: Callable[..., Any]) -> list[type[Any]]:
    """Return the classes of the objects that a function may return.

    The function is not called: it may open files and connections that a running process
    uses.

    :return: an empty list if the source does not show the class of every result.
    """
    if isinstance(factory, type):
        return [factory]
    if inspect.iscoroutinefunction(factory):
        return [CoroutineType]
    # The source below is that of the function that a decorator wraps.
    if inspect.isgeneratorfunction(inspect.unwrap(factory)):
        return []
    try:
        (code,) = ast.parse(textwrap.dedent(inspect.getsource(factory))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        # Not written in Python, or its source is not installed.
        return []
    if not isinstance(code, ast.FunctionDef) or code.decorator_list:
        return []
    nodes = list(_nodes_of(code))
    names = {**vars(builtins), **getattr(factory, "__globals__", {})}
    values = [node.value for node in nodes if isinstance(node, ast.Return)]
    made = [_type_of(value, names, nodes) for value in values or [None]]
    known = [each for each in made if each is not None]
    return known if len(known) == len(made) else []


def _nodes_of(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of inner functions and classes."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(
            child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        ):
            yield from _nodes_of(child)


def _type_of(
    value: ast.expr | None, names: Mapping[str, Any], nodes: list[ast.AST]
) -> type[Any] | None:
    """Return the class of an expression; ``None`` if it is not known."""
    if value is None:
        return NoneType
    if isinstance(value, ast.Name):
        value = _assigned_once(value.id, nodes) or value
    if isinstance(value, ast.Call):
        called: Any = None
        first, *attributes = ast.unparse(value.func).split(".")
        with suppress(AttributeError, KeyError):
            called = functools.reduce(getattr, attributes, names[first])
        return called if isinstance(called, type) else None
    try:
        return type(ast.literal_eval(value))
    except (TypeError, ValueError):
        return None


def _assigned_once(name: str, nodes: list[ast.AST]) -> ast.expr | None:
    """Return the value of a local variable, if it is set in one place."""
    stored = [
        node
        for node in nodes
        if isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Store)
    ]
    for node in nodes:
        if isinstance(node, ast.Assign) and node.targets == stored:
            return node.value
    return None
