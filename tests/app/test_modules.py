"""Tests for synapse_replication.app.modules."""

from __future__ import annotations

import functools
import sys
import textwrap
from pathlib import Path
from types import NoneType
from typing import Any

from twisted.application.service import MultiService
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.modules import (
    add_service,
    check_sink,
    find_made_types,
    load_factories,
)
from synapse_replication.config.process import load_config
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.errors import ConfigError
from synapse_replication.handlers.interfaces import RowSink
from tests.config.process_case import HOMESERVER
from tests.support.config_files import FilesMixin


def make_something(host: Any, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A factory that a configuration may name."""
    return host, config


async def make_later(host: Any, config: dict[str, Any]) -> object:
    """A coroutine function, which cannot be a factory of a sink."""
    return object()


def make_nothing(host: Any, config: dict[str, Any]) -> None:
    """A factory that forgets to return its sink."""

    def helper() -> int:
        return 1

    helper()


class Wrong:
    """Has no method of a sink."""

    def __init__(self, *_: Any) -> None:
        self.rows = 0


def make_wrong(host: Any, config: dict[str, Any]) -> Any:
    """A factory that returns something else than a sink."""
    sink = Wrong()
    sink.rows = len(config)
    return sink


class LoadFactoriesTests(FilesMixin):
    def load(self, own: str) -> Any:
        path = self.write("h.yaml", f"{HOMESERVER}synapse_replication:\n{own}")
        return load_factories(load_config([path]))

    def test_called_with_host_and_config(self) -> None:
        """Named factories are called with the host and their configuration."""
        name = f"{__name__}.make_something"
        make_row_sink, make_command_sink, modules = self.load(
            f"  row_sink: {{module: {name}, config: {{a: 1}}}}\n"
            f"  command_sink: {{module: {name}, config: {{c: 3}}}}\n"
            f"  modules: [{{module: {name}, config: {{b: 2}}}}, {{module: {name}}}]\n"
        )
        self.assertEqual(make_row_sink("host"), ("host", {"a": 1}))
        self.assertEqual(make_command_sink("host"), ("host", {"c": 3}))
        self.assertEqual(
            [make("host") for make in modules],
            [("host", {"b": 2}), ("host", {})],
        )

    def test_no_names(self) -> None:
        """Without configured names, there are no factories."""
        self.assertEqual(self.load("  {}\n"), (None, None, []))

    def test_unresolvable_names(self) -> None:
        """All names that cannot be resolved are reported together."""
        with self.assertRaises(ConfigError) as caught:
            self.load(
                "  row_sink: {module: no_such_module.make}\n"
                f"  command_sink: {{module: {__name__}.missing}}\n"
                f"  modules: [{{module: {__name__}.mistyped}}]\n"
            )
        one, command, two = caught.exception.problems
        self.assertEqual(one.key, "synapse_replication.row_sink.module")
        self.assertIn("no_such_module cannot be imported", one.problem)
        self.assertEqual(command.key, "synapse_replication.command_sink.module")
        self.assertEqual(two.key, "synapse_replication.modules[0].module")
        self.assertIn("has no function mistyped", two.problem)

    def test_failing_import(self) -> None:
        """A module that fails when it is imported is a problem with its key."""
        folder = self.mktemp()
        Path(folder).mkdir()
        Path(folder, "broken_module_of_test.py").write_text("def make(:\n")
        self.patch(sys, "path", [folder, *sys.path])
        with self.assertRaises(ConfigError) as caught:
            self.load("  modules: [{module: broken_module_of_test.make}]\n")
        (problem,) = caught.exception.problems
        self.assertEqual(problem.key, "synapse_replication.modules[0].module")
        self.assertIn("raised SyntaxError", problem.problem)

    def test_no_sink(self) -> None:
        """A function that cannot return a sink is a problem; as a module, it is not."""
        hint = "return an object with the methods of api."
        for name, made in (
            ("make_later", "a coroutine"),
            ("make_nothing", "None"),
            ("make_wrong", "Wrong"),
            ("Wrong", "Wrong"),
        ):
            for key, interface, methods in (
                ("row_sink", "RowSink", "no on_rdata and no on_position"),
                (
                    "command_sink",
                    "CommandSink",
                    "no get_currently_syncing_users and no on_",
                ),
            ):
                with self.assertRaises(ConfigError) as caught:
                    self.load(f"  {key}: {{module: {__name__}.{name}}}\n")
                (found,) = caught.exception.problems
                self.assertEqual(found.key, f"synapse_replication.{key}.module")
                self.assertIn(f"the sink is {made}, which has {methods}", found.problem)
                self.assertIn(hint + interface, found.hint)
        self.load(f"  modules: [{{module: {__name__}.make_nothing}}]\n")

    def test_same_message_at_the_start(self) -> None:
        """The object is refused at the start with the message of the function."""
        with self.assertRaises(ConfigError) as caught:
            self.load(f"  row_sink: {{module: {__name__}.make_wrong}}\n")
        (of_function,) = caught.exception.problems
        options = ReplicationOptions(
            server_name="x.test", instance_name="me", streams=[]
        )
        with self.assertRaises(ConfigError) as caught:
            check_sink(make_wrong(None, {}), RowSink, options, "sink")
        (of_object,) = caught.exception.problems
        self.assertEqual(of_object.problem, of_function.problem)
        self.assertEqual(of_object.hint, of_function.hint)


class AddServiceTests(SynchronousTestCase):
    def test_not_a_service(self) -> None:
        """The result of a module must be a service or ``None``."""
        parent: Any = MultiService()
        options = ReplicationOptions(
            server_name="x.test", instance_name="me", streams=[]
        )
        add_service(None, parent, options)
        self.assertEqual(list(parent), [])
        for wrong in (make_later(None, {}), object()):
            with self.assertRaises(ConfigError) as caught:
                add_service(wrong, parent, options)
            self.assertIn("which is not a service", str(caught.exception))


class Sink:
    pass


def returns_global() -> Any:
    return Sink()


def returns_attribute() -> Any:
    return textwrap.TextWrapper()


def returns_variable() -> Any:
    sink = Sink()
    sink.rows = 1  # type: ignore[attr-defined]
    return sink


def returns_one_of_two(flag: bool) -> Any:
    if flag:
        return {}
    return None


def assigns_twice() -> Any:
    sink: Any = Sink()
    if sink.other:
        sink = sink.other
    return sink


def calls_a_function() -> Any:
    return len([1])


def returns_itself() -> Any:
    sink: Any
    sink = sink  # noqa: F821
    return sink


def returns_argument(sink: Any) -> Any:
    return sink


def yields() -> Any:
    yield 1


def calls_next() -> Any:
    return next(yields())


calls_next = functools.wraps(yields)(calls_next)


def has_inner_function() -> None:
    def inner() -> Any:
        return Sink()

    inner()


class FindMadeTypesTests(SynchronousTestCase):
    def test_known(self) -> None:
        """Classes, literals and variables that are set once are found."""
        for function, made in (
            (Sink, [Sink]),
            (returns_global, [Sink]),
            (returns_attribute, [textwrap.TextWrapper]),
            (returns_variable, [Sink]),
            (returns_one_of_two, [dict, NoneType]),
            (has_inner_function, [NoneType]),
        ):
            self.assertEqual(find_made_types(function), made, function)

    def test_unknown(self) -> None:
        """No class is returned if only a call could show it."""
        for function in (
            assigns_twice,
            calls_a_function,
            returns_itself,
            returns_argument,
            yields,
            calls_next,
            len,
        ):
            self.assertEqual(find_made_types(function), [], function)
