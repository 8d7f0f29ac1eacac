"""Tests for the tree of options: its declarations, and the checks that come from it."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.api import (
    BacklogOptions,
    PendingLimit,
    ReceiverOptions,
    ReplicationOptions,
)
from synapse_replication.config.process import ProcessConfig
from synapse_replication.dropin.settings import DropInSettings
from synapse_replication.options import (
    InvalidValueError,
    build,
    leaves,
    option,
    to_scalar,
)


class DeclarationTests(SynchronousTestCase):
    def test_described(self) -> None:
        """Every option has a description, which ends with a full stop."""
        for options in (ProcessConfig, DropInSettings):
            for leaf in leaves(options):
                self.assertRegex(leaf.meaning, r"^[A-Z`].*\.$", leaf.dotted)

    def test_distinct(self) -> None:
        """No two options have one key, and no two settings have one variable."""
        keys = [leaf.key for leaf in leaves(ProcessConfig)]
        self.assertCountEqual(keys, set(keys))
        variables = [leaf.variable for leaf in leaves(DropInSettings)]
        self.assertCountEqual(variables, set(variables))


@attrs.frozen
class _Inner:
    """A group in a group.

    :ivar name: what it is called.
    :ivar size: how large it is.
    """

    name: str = attrs.field(metadata=option())
    size: int = attrs.field(default=1, metadata=option())


@attrs.frozen
class _Group:
    """A group.

    :ivar inner: a group.
    :ivar count: how many there are.
    """

    inner: _Inner | None = attrs.field(
        default=_Inner("x"), metadata=option(switch="is_on", switch_meaning="Whether.")
    )
    count: int = attrs.field(default=0, metadata=option())


@attrs.frozen
class _Options:
    """The root.

    :ivar group: a group.
    """

    group: _Group = attrs.field(factory=_Group, metadata=option())


class BuildTests(SynchronousTestCase):
    def build(self, **values: object) -> _Options:
        keys = {
            leaf.key: values[leaf.key[-1]]
            for leaf in leaves(_Options)
            if leaf.key[-1] in values
        }
        return _Options(**build(_Options, keys))

    def test_group_in_a_group(self) -> None:
        """Options at any depth are set; those of a group without values are not."""
        self.assertEqual(self.build(), _Options())
        self.assertEqual(
            self.build(name="y", count=2), _Options(_Group(_Inner("y"), 2))
        )
        self.assertEqual(self.build(is_on=False), _Options(_Group(None)))

    def test_required(self) -> None:
        """A group that lacks a required option is left out, not the one around it."""
        self.assertEqual(self.build(size=3, count=2), _Options(_Group(count=2)))


class CheckTests(SynchronousTestCase):
    """Tests for the checks of options in Python, which are those of the files."""

    options = ReplicationOptions(server_name="x.test", instance_name="w1", streams=())

    def problems(self, options: ReplicationOptions) -> list[str]:
        return [f"{each.key}: {each.problem}" for each in options.find_problems()]

    def test_valid(self) -> None:
        """Valid options have no problems."""
        self.assertEqual(self.problems(self.options), [])

    def test_range(self) -> None:
        """A number outside its range is a problem, in groups, too."""
        changed = attrs.evolve(
            self.options,
            max_tcp_connections=9,
            torture_level=60_001,
            tcp_limit=PendingLimit(lines=99),
            receiving=ReceiverOptions(max_batch_rows=99),
            backlog=BacklogOptions(max_rows=-1),
        )
        self.assertCountEqual(
            self.problems(changed),
            [
                "max_tcp_connections: expected `int` >= 10",
                "torture_level: expected `int` <= 60000",
                "tcp_limit.lines: expected `int` >= 100",
                "receiving.max_batch_rows: expected `int` >= 100",
                "backlog.max_rows: expected `int` >= 0",
            ],
        )

    def test_type(self) -> None:
        """A value of another type is a problem."""
        changed = attrs.evolve(
            self.options,
            max_tcp_connections="many",  # type: ignore[arg-type]
        )
        self.assertEqual(
            self.problems(changed), ["max_tcp_connections: expected `int`, got `str`"]
        )

    def test_writers_of_an_unknown_stream(self) -> None:
        """The name that was meant is suggested; else, where a module declares them."""
        for name, hint in (
            ("typnig", "did you mean 'typing'?"),
            ("readings", "pass the writers to host.streams.add()"),
        ):
            writers = {"typing": ["w1"], name: ["w1"]}
            changed = attrs.evolve(self.options, streams=["typing"], writers=writers)
            (problem,) = changed.find_problems()
            self.assertEqual(problem.problem, f"there is no stream {name}")
            self.assertIn(hint, str(problem))

    def test_of_files(self) -> None:
        """The options that files set have the same checks as those of Python."""
        config = ProcessConfig(
            files=["h.yaml"],
            server_name="x.test",
            instance_name="w1",
            streams=("typnig",),
            max_tcp_connections=9,
        )
        self.assertEqual(
            [str(problem) for problem in config.find_problems()],
            [
                "h.yaml: synapse_replication.direct_tcp.max_connections: expected "
                "`int` >= 10; write a number in the range",
                "h.yaml: synapse_replication.streams: 'typnig' is not a standard "
                "stream; did you mean 'typing'?",
            ],
        )


class ToScalarTests(SynchronousTestCase):
    def test_texts(self) -> None:
        """Texts of numbers and truth values are converted, as in an environment."""
        for kind, text, value in (
            (bool, "true", True),
            (bool, "0", False),
            (bool, 1, True),
            (int, "12", 12),
            (int, 3.0, 3),
            (float, "0.5", 0.5),
            (float, 2, 2.0),
            (str, "x", "x"),
        ):
            found = to_scalar(kind, text)
            self.assertEqual(found, value)
            self.assertIs(type(found), kind)

    def test_invalid(self) -> None:
        """Other values are refused, with a hint."""
        for kind, value in (
            (bool, "yes"),
            (bool, 2),
            (int, True),
            (int, 1.5),
            (int, "1.5"),
            (int, None),
            (float, "x"),
            (float, []),
            (str, 5),
            (str, None),
        ):
            self.assertRaises(InvalidValueError, to_scalar, kind, value)
