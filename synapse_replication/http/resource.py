"""HTTP resource that serves this instance's rows to readers that missed them.

Requests are idempotent, so responses are not cached: a repeated ``txn_id`` gets a fresh
response. But many readers may miss the same rows at the same time: while rows are
fetched, further requests for the same range wait for the same page, unless the stream
has advanced since.

Errors are 400 ``M_MISSING_PARAM`` or ``M_INVALID_PARAM`` for a parameter, 400
``M_UNKNOWN`` for a stream that is unknown, or that another instance holds in memory,
404 for an unknown path or one without ``txn_id``, 405 for a method other than GET, 401
for a missing or wrong secret, and 500 if the rows cannot be fetched.

Readers that speak the extension pass the ``epoch`` from which they expect rows; the
response is 409 if this instance's epoch differs, because its rows may differ, too. A
page of a stream held in memory has the field ``epoch``, so that a reader that does not
know this instance yet learns of which epoch the rows are. With ``backlog=1`` they
request rows from the backlog; the response is 410 if the rows are not in the backlog.
An instance without a backlog ignores ``backlog``, and one that does not speak the
extension ignores ``epoch``.

``GET /_synapse/replication/status`` returns the status of this instance's replication.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET
from typing_extensions import override

from synapse_replication.errors import (
    CatchUpError,
    LocalProtocolError,
    ReplicationError,
    RowsLostError,
)
from synapse_replication.handlers.events import (
    Discarded,
    DiscardReason,
    RequestRefused,
    RowsServed,
)
from synapse_replication.handlers.interfaces import StreamDirectory
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.streams.backlog import Backlog
from synapse_replication.streams.rows import decode_json, encode_json
from synapse_replication.streams.stream import (
    EncodedUpdates,
    JsonValue,
    Stream,
    StreamUpdateResult,
)
from synapse_replication.wire.commands import parse_token

_ENDPOINT = b"get_repl_stream_updates"


#: The code of the answer that rows do not exist any more.
LOST = "ROWS_LOST"


class _RefusedError(ReplicationError):
    """The error with which a request is answered."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.code = code


#: A stream, the range of its rows, and its position when they were requested: rows that
#: were committed afterwards may be missing in a page that was requested before.
_Range: TypeAlias = tuple[str, int, int, int]


class ReplicationResource(Resource):
    """The resource to be mounted at ``/_synapse/replication/``.

    :param streams: the streams that this instance follows, and those that it writes.
    :param instance_name: the name of this instance; only its own rows are served.
    :param secret: the bearer token of a request; ``None`` to require none.
    :param observer: notified of served requests, refused requests and failures.
    :param epoch: this instance's epoch; ``None`` if it does not speak the extension.
    :param backlog: the rows that this instance sent most recently; ``None`` if it has
        no backlog.
    :param status: returns the status of this instance's replication as JSON, which is
        served at ``status``; ``None`` to serve no status.
    """

    isLeaf = True  # noqa: N815

    def __init__(
        self,
        streams: StreamDirectory,
        instance_name: str,
        secret: str | None,
        observer: ReplicationObserver,
        *,
        epoch: str | None = None,
        backlog: Backlog | None = None,
        status: Callable[[], bytes] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams
        self._instance_name = instance_name
        self._secret = None if secret is None else secret.encode()
        self._observer = observer
        self._epoch = epoch
        self._backlog = backlog
        self._status = status
        #: The requests that wait for each page that is being fetched.
        self._fetching: dict[_Range, list[Deferred[bytes]]] = {}

    @property
    def has_backlog(self) -> bool:
        """Whether requests with ``backlog=1`` are answered from a backlog."""
        return self._backlog is not None

    @override
    def render(self, request: Any) -> Any:
        request.setHeader(b"Content-Type", b"application/json")
        request.setHeader(b"Cache-Control", b"no-cache")
        try:
            if request.postpath == [b"status"] and self._status is not None:
                self._check(request)
                return self._status()
            stream, from_token, upto_token = self._read(request)
        except _RefusedError as refused:
            return self._refuse(request, refused)
        if self._backlog is not None and request.args.get(b"backlog") == [b"1"]:
            name = stream.description.name
            with self._observer.span(RowsServed(name, _headers(request))):
                found = self._backlog.read(name, from_token, upto_token)
                if found is None:
                    text = (
                        f"the rows of {name} after {from_token} are not in the backlog"
                    )
                    missing = _RefusedError(410, "M_UNKNOWN", text)
                    return self._refuse(request, missing)
                return self._encode_page(stream, found)
        Deferred.fromCoroutine(self._answer(request, stream, from_token, upto_token))
        return NOT_DONE_YET

    async def _answer(
        self, request: Any, stream: Stream, from_token: int, upto_token: int
    ) -> None:
        disconnections: list[Failure] = []
        request.notifyFinish().addErrback(disconnections.append)
        serving = self._observer.span(
            RowsServed(stream.description.name, _headers(request))
        )
        try:
            with serving:
                body = await self._body(stream, from_token, upto_token)
        except RowsLostError as error:
            request.setResponseCode(410)
            lost = {"errcode": LOST, "error": str(error), "lost_upto": error.lost_upto}
            body = encode_json(lost)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self._observer.failure("serving rows over HTTP", error)
            # The text of an unexpected error may reveal internals, so it is not sent.
            text = str(error) if isinstance(error, CatchUpError) else "internal error"
            body = _error_body(request, _RefusedError(500, "M_UNKNOWN", text))
        if not disconnections:
            request.write(body)
            request.finish()

    async def _body(self, stream: Stream, from_token: int, upto_token: int) -> bytes:
        """Return the page of a range; fetch it once for all that ask meanwhile."""
        position = stream.minimal_local_current_token()
        key = stream.description.name, from_token, upto_token, position
        if key in self._fetching:
            shared: Deferred[bytes] = Deferred()
            self._fetching[key].append(shared)
            return await shared
        self._fetching[key] = []
        try:
            if from_token >= upto_token:
                page = StreamUpdateResult([], upto_token, False)
            else:
                page = await stream.get_updates_since(
                    self._instance_name, from_token, upto_token
                )
            if stream.description.held_in_memory:
                page = attrs.evolve(page, epoch=self._epoch)
            body = self._encode_page(stream, page)
        except Exception:
            for waiting in self._fetching.pop(key):
                waiting.errback()
            raise
        for waiting in self._fetching.pop(key):
            waiting.callback(body)
        return body

    def _read(self, request: Any) -> tuple[Stream, int, int]:
        """Parse and check a request for rows.

        :raises _RefusedError: if the request is refused.
        """
        path: Sequence[bytes] = request.postpath
        if len(path) != 3 or path[0] != _ENDPOINT or not path[2]:
            raise _RefusedError(404, "M_UNRECOGNIZED", "this path does not exist")
        self._check(request)
        epochs = request.args.get(b"epoch")
        if epochs and self._epoch is not None and epochs != [self._epoch.encode()]:
            raise _RefusedError(
                409, "M_UNKNOWN", "this process was restarted: its epoch differs"
            )
        stream = self._find(path[1].decode("utf-8", "replace"))
        return (
            stream,
            _integer(request, b"from_token"),
            _integer(request, b"upto_token"),
        )

    def _check(self, request: Any) -> None:
        """Check the method and the secret of a request."""
        if request.method != b"GET":
            request.setHeader(b"Allow", b"GET")
            raise _RefusedError(405, "M_UNRECOGNIZED", "only GET is allowed")
        if self._secret is None:
            return
        given = request.getHeader(b"Authorization") or b""
        if not hmac.compare_digest(given, b"Bearer " + self._secret):
            raise _RefusedError(
                401,
                "M_UNAUTHORIZED",
                "the secret for replication is missing or wrong",
            )

    def _refuse(self, request: Any, refused: _RefusedError) -> bytes:
        self._observer.observe(RequestRefused(refused.status, str(refused)))
        return _error_body(request, refused)

    def _find(self, name: str) -> Stream:
        stream = self._streams.get_streams().get(name)
        if stream is None:
            raise _RefusedError(400, "M_UNKNOWN", "there is no stream of that name")
        if stream.description.held_in_memory and all(
            ours.description.name != name
            for ours in self._streams.get_streams_to_replicate()
        ):
            raise _RefusedError(
                400,
                "M_UNKNOWN",
                f"{name} is held in memory by its writer, and {self._instance_name} "
                "does not write it; request it from the writer",
            )
        return stream

    def _encode_page(self, stream: Stream, result: StreamUpdateResult) -> bytes:
        try:
            return _encode(result.updates, result)
        except ValueError:
            pass
        updates = result.updates
        if isinstance(updates, EncodedUpdates):
            updates = updates.encoded
        # A row that is not valid JSON is skipped; otherwise, it would stop the stream.
        valid = []
        for token, row in updates:
            try:
                value = decode_json(row) if updates is not result.updates else row
                encode_json(value)
            except ValueError as error:
                self._report_skipped(stream, token, error)
            else:
                valid.append((token, value))
        return _encode(valid, result)

    def _report_skipped(self, stream: Stream, token: int, error: ValueError) -> None:
        description = stream.description
        self._observer.observe(
            Discarded(description.name, self._instance_name, DiscardReason.SKIPPED, 1)
        )
        where = description.describe_row(token)
        self._observer.failure(
            f"serving a row of {description.name}",
            LocalProtocolError(f"{where} was skipped: {error}"),
        )


def _headers(request: Any) -> dict[str, str]:
    headers = request.requestHeaders.getAllRawHeaders()
    return {
        name.decode("latin-1").lower(): values[-1].decode("latin-1")
        for name, values in headers
        if name.lower() != b"authorization"
    }


def _integer(request: Any, name: bytes) -> int:
    values = request.args.get(name)
    if not values:
        raise _RefusedError(
            400, "M_MISSING_PARAM", f"parameter {name.decode()} is missing"
        )
    try:
        return parse_token(values[0].decode("ascii", "replace"))
    except ValueError:
        raise _RefusedError(
            400,
            "M_INVALID_PARAM",
            f"parameter {name.decode()} is not a 64-bit decimal integer",
        ) from None


def _encode(
    updates: Sequence[tuple[int, JsonValue]], result: StreamUpdateResult
) -> bytes:
    page: dict[str, JsonValue] = {
        "updates": list(updates),
        "upto_token": result.upto_token,
        "limited": result.limited,
    }
    if result.epoch is not None:
        page["epoch"] = result.epoch
    return encode_json(page)


def _error_body(request: Any, refused: _RefusedError) -> bytes:
    """Set the status of the response, and return its body."""
    request.setResponseCode(refused.status)
    return encode_json({"errcode": refused.code, "error": str(refused)})
