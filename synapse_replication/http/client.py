"""HTTP client that fetches missed rows from their writer, or an instance's status.

A request for rows is ``GET
<base>/_synapse/replication/get_repl_stream_updates/<stream>/<txn_id>
?from_token=&upto_token=`` with ``Authorization: Bearer <secret>``. The response is
``{"updates": [[token, row], ...], "upto_token": n, "limited": bool}``; an instance that
speaks the extension adds its ``epoch`` to a page of a stream that it holds in memory.

Stock instances cache a response by its ``<txn_id>`` for half an hour, so every request,
including a retry, has a new random ``<txn_id>``. Stock instances answer 500 to a wrong
secret; instances that run this package answer 401.

A request for rows to an instance that speaks the extension also has the parameter
``epoch``; the instance answers 409 if its epoch differs. The parameter ``backlog=1``
requests the rows from the instance's backlog; the instance answers 410 if they are not
there. An instance without a backlog ignores ``backlog=1``. Requests to stock instances
do not have these parameters.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import msgspec
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from synapse_replication.errors import HttpCatchUpError, RowsLostError
from synapse_replication.handlers.events import RowsRequest
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.timer import Backoff
from synapse_replication.http.location import InstanceLocation
from synapse_replication.streams.rows import MAX_BATCH_LENGTH, MAX_VALUES
from synapse_replication.streams.stream import StreamUpdateResult, UpdateFunction
from synapse_replication.transport.error_text import explain
from synapse_replication.wire.extension import MAX_NAME_LENGTH, Int64

if TYPE_CHECKING:
    from twisted.web.iweb import IAgent

    from synapse_replication.handlers.interfaces import Clock

#: The longest accepted response body, in bytes, as received and decompressed. A page
#: may exceed :data:`.PAGE_BYTES` by the rows of one token: :data:`.MAX_BATCH_LENGTH`.
MAX_ANSWER_LENGTH = 2 * MAX_BATCH_LENGTH
#: Default time limit of a request for rows and its response, in s.
REQUEST_TIMEOUT = 30.0
#: Time limit of a request to a writer's backlog, in s. It is short, because the backlog
#: is in memory and the caller has another source of the rows.
BACKLOG_TIMEOUT = 3.0
#: Time limit of a status request, in s.
STATUS_TIMEOUT = 5.0
#: The largest number of requests of :func:`with_retries`.
ATTEMPTS = 3
#: The delay before the second request, in s; it doubles before each further request.
FIRST_DELAY = 0.25
#: The longest delay, in s.
MAX_RETRY_DELAY = 5.0

_SECRET_HINT = "configure the same replication secret for both processes"
#: The hints for the statuses of responses.
_HINTS = {
    401: _SECRET_HINT,
    403: _SECRET_HINT,
    404: "configure the address of a listener with the replication resource; a stock "
    "instance does not serve a status",
    500: "see the log of that instance; a stock instance answers 500 to a wrong "
    f"secret: {_SECRET_HINT}",
}


class _Answer(msgspec.Struct):
    updates: list[tuple[Int64, Any]]
    upto_token: Int64
    limited: bool
    epoch: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class _Lost(msgspec.Struct):
    """The body of the answer that rows do not exist any more."""

    error: str
    lost_upto: Int64


_decode_lost = msgspec.json.Decoder(_Lost).decode


def _raise_if_lost(error: HttpCatchUpError) -> None:
    if error.status != 410:
        return
    try:
        lost = _decode_lost(error.body)
    except (msgspec.MsgspecError, RecursionError):
        return
    raise RowsLostError(lost.error, lost.lost_upto) from error


def _or_unobserved(observer: ReplicationObserver | None) -> ReplicationObserver:
    return observer or ReplicationObserver()


@attrs.define(eq=False, repr=False)
class HttpCatchUpClient:
    """Client of the writers' replication resources. It does not retry.

    :param agent: see :func:`make_agent`; ``None`` if there are no locations.
    :param locations: the location of each instance, by its name (``instance_map``).
    :param secret: the ``worker_replication_secret``; ``None`` to send none.
    :param clock: the reactor.
    :param timeout: time limit of a request for rows and its response, in s. Requests
        for a backlog or a status have their own limits.
    :param max_answer_length: the longest accepted response body, in bytes, as received
        and decompressed.
    :param epoch_of: returns an instance's epoch, or ``None`` if the epoch is not known;
        without this parameter, this process does not speak the extension, and the
        epochs of pages are ignored: it could not tell whether they are new.
    :param observer: notified of each request for rows.
    """

    _agent: IAgent | None
    _locations: Mapping[str, InstanceLocation]
    _secret: str | None
    _clock: IReactorTime
    _timeout: float = attrs.field(default=REQUEST_TIMEOUT, kw_only=True)
    _max_answer_length: int = attrs.field(default=MAX_ANSWER_LENGTH, kw_only=True)
    _epoch_of: Callable[[str], str | None] | None = attrs.field(
        default=None, kw_only=True
    )
    _observer: ReplicationObserver = attrs.field(
        default=None, converter=_or_unobserved, kw_only=True
    )

    def for_stream(self, stream_name: str) -> UpdateFunction:
        """Return the update function of one stream."""
        return partial(self.get_updates_since, stream_name)

    async def get_updates_since(
        self,
        stream_name: str,
        instance_name: str,
        from_token: int,
        upto_token: int,
        limit: int = 0,
    ) -> StreamUpdateResult:
        """Fetch one page of a writer's rows in ``(from_token, upto_token]``.

        :param limit: ignored: the writer chooses the page size.
        :raises RowsLostError: if the writer does not have the rows any more.
        :raises HttpCatchUpError: if the instance's address is not configured, the
            request fails, or the response is not a page of rows.
        """
        query = {"from_token": str(from_token), "upto_token": str(upto_token)}
        epoch = None if self._epoch_of is None else self._epoch_of(instance_name)
        if epoch is not None:
            query["epoch"] = epoch
        try:
            page = await self._get(stream_name, instance_name, query, self._timeout)
        except HttpCatchUpError as error:
            _raise_if_lost(error)
            raise
        if page.limited or page.upto_token >= upto_token:
            return page
        # This is the last page and it ends below upto_token, so it ends at the writer's
        # current token.
        return attrs.evolve(page, last_token=page.upto_token)

    async def get_backlog(
        self,
        stream_name: str,
        instance_name: str,
        epoch: str,
        from_token: int,
        upto_token: int,
    ) -> StreamUpdateResult:
        """Fetch a page of rows in ``(from_token, upto_token]`` from a writer's backlog.

        :param epoch: the expected epoch of the writer.
        :raises HttpCatchUpError: if the instance's address is not configured, the
            request fails, or the response is not a page of rows. The error's status is
            409 if the writer has another epoch, and 410 if the rows are not in its
            backlog.
        """
        query = {"from_token": str(from_token), "upto_token": str(upto_token)}
        query.update(epoch=epoch, backlog="1")
        return await self._get(stream_name, instance_name, query, BACKLOG_TIMEOUT)

    async def get_status(self, instance_name: str) -> bytes:
        """Fetch the replication status of an instance of this package.

        :return: the JSON text, not validated.
        :raises HttpCatchUpError: if the instance's address is not configured, or the
            request fails. The error's status is 404 if the instance does not serve a
            status, for instance because it is stock.
        """
        what, path = "status", ["status"]
        _, body = await self._send_get(what, instance_name, path, {}, STATUS_TIMEOUT)
        return body

    async def _get(
        self,
        stream_name: str,
        instance_name: str,
        query: Mapping[str, str],
        timeout: float,
    ) -> StreamUpdateResult:
        path = ("get_repl_stream_updates", stream_name, secrets.token_urlsafe(12))
        headers: dict[str, str] = {}
        with self._observer.span(RowsRequest(stream_name, instance_name, headers)):
            shown, body = await self._send_get(
                stream_name, instance_name, path, query, timeout, headers
            )
        try:
            answer = _decode_answer(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HttpCatchUpError(
                "GET", shown, 200, f"the response is not a page of rows: {error}"
            ) from error
        epoch = None if self._epoch_of is None else answer.epoch
        return StreamUpdateResult(
            answer.updates, answer.upto_token, answer.limited, epoch=epoch
        )

    async def _send_get(
        self,
        what: str,
        instance_name: str,
        path: Sequence[str],
        query: Mapping[str, str],
        timeout: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[str, bytes]:
        """Send a GET request for a path below the replication resource.

        :return: the URL, as text for display, and the response body.
        """
        location = self._locations.get(instance_name)
        if location is None or self._agent is None:
            raise HttpCatchUpError(
                "GET",
                f"{what} of {instance_name}",
                None,
                "the address of this instance is not configured",
                f"add {instance_name} to the addresses of the instances",
                was_sent=False,
            )
        if self._secret is not None:
            headers = {**headers, "Authorization": f"Bearer {self._secret}"}
        headers = {"Accept": "application/json", **headers}
        if location.host is not None:
            # The host in the URL may be an alias; the server accepts its own names.
            headers = {**headers, "Host": location.text}
        # treq was imported to make the agent.
        from synapse_replication.http.agent import get, make_url

        url, shown = make_url(location, path)
        for name, value in query.items():
            url = url.set(name, value)
        started = self._clock.seconds()
        answering = Deferred.fromCoroutine(
            get(
                self._agent,
                url,
                headers,
                reactor=self._clock,
                max_length=self._max_answer_length,
                max_values=MAX_VALUES,
            )
        )
        answering.addTimeout(timeout, self._clock)
        try:
            status, body = await answering
        except Exception as error:
            text = self._scrub(_explain(error))
            if self._clock.seconds() - started >= timeout:
                # A cancelled request raises different errors in different phases.
                text = f"no response within {timeout:g} s"
            raise HttpCatchUpError("GET", shown, None, text) from error
        if status != 200:
            text = self._scrub(body.decode("utf-8", "replace"))
            raise HttpCatchUpError("GET", shown, status, text, _HINTS.get(status, ""))
        return shown, body

    def _scrub(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text


def with_retries(
    fetch: UpdateFunction, clock: Clock, random: Callable[[], float]
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
        for attempt in range(1, ATTEMPTS):
            try:
                return await fetch(instance_name, from_token, upto_token, limit)
            except HttpCatchUpError as error:
                has_failed = error.status is None or error.status >= 500
                if not (error.was_sent and has_failed):
                    raise
            await clock.sleep(backoff.delay(attempt))
        return await fetch(instance_name, from_token, upto_token, limit)

    return retrying


def _explain(error: Exception) -> str:
    # twisted.web's errors wrap their causes.
    reasons: Sequence[Failure] = getattr(error, "reasons", ())
    causes = [reason.value for reason in reasons if reason.value is not None]
    return "; ".join(map(explain, causes or [error]))
