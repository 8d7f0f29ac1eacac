"""The homeserver's test modules that are run."""

from __future__ import annotations

#: All tests of the homeserver: about 350 modules, for which two cores take hours.
WHOLE = ("tests",)

#: Everything that involves replication: the protocol, ids, and the replicated streams.
FULL = (
    "tests.replication",
    "tests.storage.test_id_generators",
    "tests.handlers.test_typing",
    "tests.handlers.test_presence",
    "tests.handlers.test_receipts",
    "tests.handlers.test_device",
    "tests.handlers.test_worker_lock",
    "tests.handlers.test_sync",
    "tests.handlers.test_sliding_sync",
    "tests.rest.client.test_sync",
    "tests.rest.client.sliding_sync",
    "tests.rest.client.test_sendtodevice",
    "tests.util.test_task_scheduler",
    "tests.push",
    "tests.storage.test_events",
    "tests.storage.test_receipts",
    "tests.storage.test_devices",
    "tests.storage.databases.main.test_receipts",
    "tests.storage.databases.main.test_events_worker",
    "tests.storage.databases.main.test_lock",
)

#: Modules that drive workers with a simulated clock; they take less than two minutes.
SHORT = (
    "tests.replication.tcp",
    "tests.replication.test_federation_ack",
    "tests.replication.test_sharded_event_persister",
    "tests.handlers.test_typing",
    "tests.handlers.test_receipts",
    "tests.handlers.test_presence.WorkerPresenceThrottleTestCase",
    "tests.handlers.test_worker_lock.WorkerLockWorkersTestCase",
    "tests.storage.test_id_generators",
)
