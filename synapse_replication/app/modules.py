"""Import of the functions that the configuration names, and checks of their results.

A function that creates a sink may open files and connections that a running process
uses, so a check of the configuration must not call it. If its source shows the class of
its result, the class is checked instead.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import CoroutineType, MappingProxyType, NoneType
from typing import Any, TypeAlias

from twisted.application.service import IService, MultiService

from synapse_replication.config.process import FactorySection, ProcessConfig
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.errors import ConfigError, ConfigProblem
from synapse_replication.handlers.interfaces import CommandSink, RowSink

#: Creates an object of the user; called with the host.
_Factory: TypeAlias = Callable[[Any], Any]

#: The options whose functions return a sink, and its interface.
_SINKS: Mapping[str, type[Any]] = MappingProxyType(
    {"row_sink": RowSink, "command_sink": CommandSink}
)


def load_factory(
    section: FactorySection, option: str, config: ProcessConfig
) -> _Factory:
    """Import the function that a section names.

    :param option: the option that the section sets, for the error.
    :return: a function that takes the host and calls the imported function with the
        host and the section's ``config``.
    :raises ConfigError: if the module cannot be imported, or has no such function.
    """
    module_name, _, name = section.module.rpartition(".")
    error = functools.partial(config.error, f"{option}.module")
    try:
        module = importlib.import_module(module_name)
    except ImportError as why:
        raise error(
            f"{module_name} cannot be imported: {why}",
            "install it where this process runs, or correct the name",
        ) from why
    except Exception as why:
        raise error(
            f"{module_name} raised {type(why).__name__} when it was imported: {why}",
            "correct the module",
        ) from why
    factory = getattr(module, name, None)
    if not callable(factory):
        raise error(
            f"{module_name} has no function {name}",
            "write the dotted name of a function that takes (host, config)",
        )
    if (interface := _SINKS.get(option)) is not None:
        made = find_made_types(factory)
        if made and all(_missing_methods(each, interface) for each in made):
            raise error(*_why_no_sink(made[0], interface))

    def make(host: Any) -> Any:
        return factory(host, dict(section.config))

    # Hooks show this name.
    make.__module__, make.__qualname__ = module_name, name
    return make


def check_sink(
    sink: Any, interface: type[Any], options: ReplicationOptions, option: str
) -> None:
    """Check that an object has the methods of a sink.

    :param interface: the protocol class of the sink.
    :param option: the option that sets the sink, for the error.
    :raises ConfigError: if it does not have them.
    """
    if _missing_methods(sink, interface):
        if inspect.iscoroutine(sink):
            sink.close()
        raise options.error(option, *_why_no_sink(type(sink), interface))


def _missing_methods(sink: Any, interface: type[Any]) -> list[str]:
    """Return the methods of a sink that an object, or a class, does not have."""
    names = [name for name in vars(interface) if name.startswith(("on_", "get_"))]
    if isinstance(sink, type):
        if hasattr(sink, "__getattr__"):
            return []
        # What __init__ assigns, only the instances have.
        code = getattr(vars(sink).get("__init__"), "__code__", None)
        assigned = () if code is None else code.co_names
        names = [name for name in names if name not in assigned]
    return [name for name in names if not callable(getattr(sink, name, None))]


def _why_no_sink(made: type[Any], interface: type[Any]) -> tuple[str, str]:
    """Return what is wrong with a sink of a class, and the hint."""
    missing = " and no ".join(_missing_methods(made, interface))
    hint = f"return an object with the methods of api.{interface.__name__}"
    name = made.__name__
    if made is NoneType:
        name = "None"
    elif made is CoroutineType:
        name = "a coroutine"
        hint += "; write def, not async def"
    return f"the sink is {name}, which has no {missing}", hint


def add_service(
    service: Any, parent: MultiService, options: ReplicationOptions
) -> None:
    """Add the service that a module returned, if it returned one.

    :raises ConfigError: if it returned something else.
    """
    if service is None:
        return
    if not IService.providedBy(service):
        what = type(service).__name__
        if inspect.iscoroutine(service):
            service.close()
        problem = f"a function returned {what}, which is not a service"
        hint = "return an IService, or None; and write def, not async def"
        raise options.error("modules", problem, hint)
    service.setServiceParent(parent)  # type: ignore[no-untyped-call]


def load_factories(
    config: ProcessConfig,
) -> tuple[_Factory | None, _Factory | None, Sequence[_Factory]]:
    """Import the functions that the configuration names.

    :return: the functions that create the row sink and the command sink, ``None``
        without one, and those of ``modules``. Each is called with the host.
    :raises ConfigError: if :func:`load_factory` raises it for any function; the error
        has the problems of all functions.
    """
    sections = {
        "row_sink": config.row_sink,
        "command_sink": config.command_sink,
        **{f"modules[{index}]": each for index, each in enumerate(config.modules)},
    }
    problems: list[ConfigProblem] = []
    found: list[Any] = []
    for option, section in sections.items():
        try:
            found.append(section and load_factory(section, option, config))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    row_sink, command_sink, *modules = found
    return row_sink, command_sink, modules


def find_made_types(factory: Callable[..., Any]) -> list[type[Any]]:
    """Return the classes of the objects that a function may return.

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
