"""Bounded retries of requests that failed temporarily."""

from __future__ import annotations

from collections.abc import Callable

from synapse_replication.backoff import Backoff
from synapse_replication.errors import HttpCatchUpError
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.streams.stream import StreamUpdateResult, UpdateFunction

#: The largest number of requests.
ATTEMPTS = 3
#: The delay before the second request, in s; it doubles before each further request.
FIRST_DELAY = 0.25
#: The longest delay, in s.
MAX_RETRY_DELAY = 5.0


def with_retries(
    fetch: UpdateFunction,
    clock: Clock,
    random: Callable[[], float],
) -> UpdateFunction:
    """Return an update function that repeats failed requests.

    A request is repeated after a 5xx response, or if there was no response, for
    instance because the connection failed. It is not repeated if the address is not
    configured. Requests are idempotent, and each retry has a new ``txn_id``, so a
    request whose response was lost can be repeated. After :data:`ATTEMPTS` requests,
    the last error is raised.

    :param random: returns a number in [0, 1), which shortens a delay by up to half.
    """
    backoff = Backoff(FIRST_DELAY, MAX_RETRY_DELAY, jitter=random)

    async def retrying(
        instance_name: str, from_token: int, upto_token: int, limit: int
    ) -> StreamUpdateResult:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await fetch(instance_name, from_token, upto_token, limit)
            except HttpCatchUpError as error:
                has_failed = error.status is None or error.status >= 500
                if attempt == ATTEMPTS or not (error.was_sent and has_failed):
                    raise
            await clock.sleep(backoff.delay(attempt))
        raise AssertionError("at least one attempt is made")

    return retrying
