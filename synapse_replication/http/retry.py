"""Trying again, a bounded number of times, what may work the next time."""

from __future__ import annotations

from collections.abc import Callable

from synapse_replication.backoff import Backoff
from synapse_replication.errors import HttpCatchUpError
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.streams.stream import StreamUpdateResult, UpdateFunction

__all__ = ["with_retries"]


def with_retries(
    fetch: UpdateFunction,
    clock: Clock,
    random: Callable[[], float],
    *,
    attempts: int = 3,
    first_delay: float = 0.25,
    max_delay: float = 5.0,
) -> UpdateFunction:
    """Make an update function that asks again when there was no answer or a 5xx.

    Each request is a new one (with a new ``txn_id``): fetching changes nothing,
    so that one whose answer was lost may be repeated.

    :param random: gives a number in [0, 1); delays vary by half.
    :param attempts: requests at most.
    :param first_delay: before the second request, in s; doubled each time.
    :param max_delay: s at most.
    """
    backoff = Backoff(first_delay, max_delay, jitter=random)

    async def retrying(
        instance_name: str, from_token: int, upto_token: int, limit: int
    ) -> StreamUpdateResult:
        for attempt in range(1, attempts + 1):
            try:
                return await fetch(instance_name, from_token, upto_token, limit)
            except HttpCatchUpError as error:
                helps = error.status is None or error.status >= 500
                if attempt == attempts or not helps:
                    raise
            await clock.sleep(backoff.delay(attempt))
        raise AssertionError("at least one attempt is made")

    return retrying
