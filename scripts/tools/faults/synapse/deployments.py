"""The processes of a deployment, the mixtures of implementations, and the streams."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from tests.support.synapse_process import MAIN

#: The worker that serves ``/sync`` and writes nothing but cache invalidations.
READER = "sync1"
#: The writer of typing, receipts and to-device messages.
WRITER = "writer1"
PERSISTER = "persister1"
#: The writers whose commits can lose their answers, and which can be replaced.
REPLACEABLE = (PERSISTER, WRITER)
WORKERS = (PERSISTER, "persister2", WRITER, READER)
PROCESSES = (MAIN, *WORKERS)


@attrs.frozen
class Mixture:
    """A selection of processes that run with this package's replication.

    :ivar title: a title for display.
    :ivar on_ours: the names of the selected processes.
    :ivar options: the options of ``synapse-replication exec``.
    :ivar only_on_demand: whether it is excluded from a full run.
    """

    title: str
    on_ours: frozenset[str]
    options: tuple[str, ...] = ()
    only_on_demand: bool = False


_ALL = frozenset(PROCESSES)

#: The mixtures by their names on the command line.
DEPLOYMENTS: Mapping[str, Mixture] = {
    "ours": Mixture("all ours", _ALL),
    "no-extension": Mixture("all ours, extension off", _ALL, ("--no-extension",)),
    "main-stock": Mixture("main stock, the rest ours", _ALL - {MAIN}),
    "main-ours": Mixture("main ours, the rest stock", frozenset({MAIN})),
    "stock": Mixture("all stock", frozenset()),
    "reader-ours": Mixture(
        "the reader ours, the rest stock", frozenset({READER}), only_on_demand=True
    ),
}


TYPING = "typing"

#: The tables whose rows are delivered, by stream. Other tables of these streams use
#: ids, but their rows are not sent to the processes of the deployment.
TABLES: Mapping[str, tuple[str, ...]] = {
    "events": ("events", "current_state_delta_stream"),
    "receipts": ("receipts_linearized",),
    "to_device": ("device_inbox",),
    "caches": ("cache_invalidation_stream_by_instance",),
    "account_data": ("account_data", "room_account_data", "room_tags_revisions"),
    "presence": ("presence_stream",),
    "push_rules": ("push_rules_stream",),
    "device_lists": ("device_lists_stream", "user_signature_stream"),
}

#: The streams whose rows are checked.
JUDGED = (*TABLES, TYPING)
