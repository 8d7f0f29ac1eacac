"""Tests for synapse_replication.api."""

from __future__ import annotations

import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication import api

#: Names that other implementations of the protocol use.
KNOWN = {
    "BaseReplicationStreamProtocol",
    "CancelTaskCommand",
    "ClearUserSyncsCommand",
    "ClientReplicationStreamProtocol",
    "Command",
    "DirectTcpReplicationClientFactory",
    "ErrorCommand",
    "ExternalCache",
    "FederationAckCommand",
    "InvalidateCacheCommand",
    "LockReleasedCommand",
    "MultiWriterIdGenerator",
    "MultiWriterStreamToken",
    "NameCommand",
    "NewActiveTaskCommand",
    "PersistedPosition",
    "PingCommand",
    "PositionCommand",
    "RdataCommand",
    "RedisSubscriber",
    "RemoteServerUpCommand",
    "RemovePusherCommand",
    "ReplicateCommand",
    "ReplicationCommandHandler",
    "ReplicationDataHandler",
    "ReplicationStreamProtocolFactory",
    "ReplicationStreamer",
    "ServerCommand",
    "ServerReplicationStreamProtocol",
    "Stream",
    "StreamUpdateResult",
    "SynapseRedisFactory",
    "UserIpCommand",
    "UserSyncCommand",
    "parse_command_from_line",
}


class ApiTests(SynchronousTestCase):
    def test_every_name_can_be_imported(self) -> None:
        """Every public name can be imported."""
        for name in dir(api):
            self.assertTrue(hasattr(api, name), name)

    def test_nothing_else(self) -> None:
        """Every class and function that is listed is defined in this package."""
        for name in dir(api):
            module = getattr(getattr(api, name), "__module__", "synapse_replication")
            if name not in {"JsonValue", "STANDARD_STREAMS", "UpdateFunction"}:
                self.assertEqual(module.partition(".")[0], "synapse_replication", name)

    def test_known_names(self) -> None:
        """The names that other implementations use are public."""
        self.assertEqual(KNOWN - set(dir(api)), set())

    def test_unknown_name(self) -> None:
        """An unknown name is an AttributeError, as in any module."""
        self.assertFalse(hasattr(api, "no_such_name"))

    def test_without_driver(self) -> None:
        """Everything but the database can be used without psycopg2."""
        code = (
            "import sys; sys.modules['psycopg2'] = None\n"
            "from synapse_replication import api\n"
            "api.ReplicationCommandHandler\n"
            "try:\n    api.Database\n"
            "except ImportError:\n    print('good')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        self.assertEqual(done.stdout, "good\n")

    def test_core_without_twisted(self) -> None:
        """The package and its core do not import Twisted."""
        code = (
            "import sys\n"
            "import synapse_replication.wire.rdata\n"
            "import synapse_replication.streams.standard.registry\n"
            "import synapse_replication.streams.memory\n"
            "print([m for m in sys.modules if m.split('.')[0] == 'twisted'])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        self.assertEqual(done.stdout, "[]\n")
