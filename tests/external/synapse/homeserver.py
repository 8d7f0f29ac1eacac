"""A real homeserver on our replication in the tests' own process."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import psycopg2.extensions
from twisted.internet import reactor  # noqa: TID251 -- the one of these tests
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from synapse_replication.dropin.substitution import (
    PARTS,
    Substitution,
    substitute,
)
from synapse_replication.testing.servers import PrivateRedis, shared_postgres

_KEY = "ed25519 a_test 5R5ZsFBtqr9TZ2lPKfsPf8GTkJzVsKXFLhP4cRhU1zA"


def substitutions() -> tuple[Substitution, ...]:
    """Return the substitutions of all parts."""
    # The host chooses its reactor first.
    importlib.import_module("synapse")
    from synapse_replication.dropin.replaced_names import substitutions_of

    return substitutions_of(PARTS)


@functools.cache
def _originals() -> dict[str, Any]:
    # Once per process, as in `exec`; the other tests here start processes.
    known = substitutions()
    from synapse_replication.dropin.replaced_names import MODULES

    return substitute(known, MODULES)


def original_of(known: Substitution) -> Any:
    """Return the object of the host that a substitution replaces."""
    return _originals()[str(known)]


def host_module(name: str) -> Any:
    """Import a module of the host after ours are in place."""
    _originals()
    return importlib.import_module(f"synapse.{name}")


class RecordingConnection:
    """A connection that only has ``send_command`` and records the lines."""

    is_direct = has_own_channel = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def send_command(self, command: Any) -> None:
        """Record one command."""
        self.lines.append(f"{command.NAME} {command.to_line()}")

    def lines_of(self, name: str) -> list[str]:
        """Return the recorded lines of one command."""
        return [line for line in self.lines if line.split()[0] == name]


class HomeserverTestCase(TestCase):
    """Provides ``self.hs``, a main process with a database and a Redis of its own."""

    timeout = 60

    def other_address(self) -> dict[str, Any]:
        """Return the address of the other declared instance."""
        return {"host": "127.0.0.1", "port": 1}

    def setUp(self) -> None:
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        database = psycopg2.extensions.parse_dsn(shared_postgres().new_database())
        directory = self.mktemp()
        config = host_module("config.homeserver").HomeServerConfig()
        config.parse_config_dict(
            {
                "server_name": "test",
                "report_stats": False,
                "signing_key": _KEY,
                "macaroon_secret_key": "a",
                "form_secret": "b",
                "trusted_key_servers": [],
                "media_store_path": directory,
                "database": {
                    "name": "psycopg2",
                    "allow_unsafe_locale": True,
                    "args": {**database, "cp_min": 1, "cp_max": 3},
                },
                "redis": {"enabled": True, "host": redis.host, "port": redis.port},
                # Another persister is declared but does not run.
                "instance_map": {
                    "main": {"host": "127.0.0.1", "port": 1},
                    "other": self.other_address(),
                },
                "stream_writers": {"events": ["master", "other"]},
                "worker_replication_secret": "hush",
            },
            directory,
            directory,
        )
        self.hs = host_module("app.homeserver").SynapseHomeServer(
            "test", config=config, reactor=reactor
        )
        self.hs.setup()
        self.addCleanup(self._shut_down)

    async def _shut_down(self) -> None:
        await self.hs.shutdown()
        # Stock handlers log that they cannot start after the shutdown; ours log no
        # errors.
        for failure in self.flushLoggedErrors(Exception):
            if "HomeServer has been shutdown" not in str(failure.value):
                failure.raiseException()
        # Time for connections to close.
        await self.wait(0.1)

    async def wait(self, seconds: float = 0.01) -> None:
        """Let the reactor run."""
        await deferLater(reactor, seconds)

    async def until(self, check: Any) -> None:
        """Wait until ``check`` returns true, or the test times out."""
        while not check():
            await self.wait()

    def ids(
        self,
        instance_name: str,
        writers: Sequence[str],
        *,
        positive: bool = True,
        connection: Any,
    ) -> Any:
        """Return an id generator for the table ``foobar``."""
        generators = host_module("storage.util.id_generators")
        return generators.MultiWriterIdGenerator(
            db_conn=connection,
            db=self.hs.get_datastores().main.db_pool,
            notifier=self.hs.get_replication_notifier(),
            stream_name="foobar",
            server_name="test",
            instance_name=instance_name,
            tables=[("foobar", "instance_name", "stream_id")],
            sequence_name="foobar_seq",
            writers=list(writers),
            positive=positive,
        )
