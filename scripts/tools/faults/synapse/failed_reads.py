"""Finds users whose ``/sync`` response lacks receipts that could not be read.

Theory of operation: the homeserver reads the receipts of a response in one transaction.
If the transaction fails, for instance because PostgreSQL was restarted and the
connection is an old one, the client is not informed: the status of the response is 200,
the receipts are missing, and its token is beyond them. The receipts are therefore never
shown to the user, although replication delivered their rows. Stock processes behave
likewise. The process's log contains the failed transaction and the response, both with
the id of the request.

The functions have no side effects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_FAILED = re.compile(
    r" - (?P<request>\S+) - \[TXN OPERROR\] \{_get_linearized_receipts_for_rooms-"
)
_ANSWERED = re.compile(
    r" - (?P<request>\S+) - \S+ - \S+ - \{(?P<user>@[^}]+)\} Processed request: "
    r".* 200 \"GET /_matrix/client/v3/sync\?"
)


def users_of_failed_reads(lines: Iterable[str]) -> set[str]:
    """Return the users whose ``/sync`` succeeded although reading receipts failed.

    :param lines: the log of the process that serves ``/sync``, in order.
    """
    failed: set[str] = set()
    users: set[str] = set()
    for line in lines:
        if match := _FAILED.search(line):
            failed.add(match["request"])
        elif (match := _ANSWERED.search(line)) and match["request"] in failed:
            users.add(match["user"])
    return users
