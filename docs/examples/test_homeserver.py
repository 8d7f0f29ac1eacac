"""Test a service with a real Redis; it needs the extra ``servers``."""

from homeserver import CURSORS, CursorRow
from twisted.internet import reactor  # noqa: TID251
from twisted.trial.unittest import TestCase

from synapse_replication import api
from synapse_replication.testing import private_process, servers, sinks


class CursorTests(TestCase):
    async def test_cursors_arrive(self) -> None:
        redis = api.RedisOptions(port=servers.shared_redis().port)
        at = {"writer": api.InstanceLocation("127.0.0.1", private_process.free_port())}
        sink = sinks.CollectingSink(reactor)
        for name in ("writer", "reader"):
            options = api.ReplicationOptions(server_name=self.id(), streams=[CURSORS],
                instance_name=name, redis=redis, instances=at)  # fmt: skip
            service = api.Replication(reactor, options, sink)
            self.addCleanup(service.stopService)
            service.startService()
            await service.started
            if name == "writer":
                service["cursors"].write([CursorRow("d1", 5)])
        self.assertEqual(await sink.wait_for(1), [CursorRow("d1", 5)])
