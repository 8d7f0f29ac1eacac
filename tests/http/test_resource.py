"""Tests for the resource with treq in memory."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from urllib.parse import quote

from hypothesis import HealthCheck, given, settings, strategies as st
from treq.testing import StubTreq
from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.streams.stream import EncodedUpdates, StreamUpdateResult
from tests.http.doubles import Directory, FailureObserver, ListStream
from tests.support.http_root import under_root

_BASE = "http://writer/_synapse/replication/"
_EVENTS = _BASE + "get_repl_stream_updates/events/abc"
_SECRET = {"Authorization": "Bearer hush"}
_RANGE = {"from_token": "1", "upto_token": "9"}


class ReplicationResourceTests(SynchronousTestCase):
    """Tests for :class:`ReplicationResource`."""

    def setUp(self) -> None:
        self.events = ListStream("events", [(2, ["a"]), (3, ["b"]), (5, ["c"])])
        self.typing = ListStream("typing", [(4, ["!r", []])])
        self.observer = FailureObserver()
        self.treq: Any = self.make_treq(Directory(self.events, self.typing))

    def make_treq(self, directory: Directory, secret: str | None = "hush") -> StubTreq:
        """Return a treq that requests the resource of a directory."""
        return StubTreq(
            under_root(ReplicationResource(directory, "writer1", secret, self.observer))
        )

    def send_request(
        self,
        url: str = _EVENTS,
        *,
        method: str = "GET",
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return the status and the JSON body of a response."""
        response = self.successResultOf(
            self.treq.request(
                method,
                url,
                params=_RANGE if params is None else params,
                headers=_SECRET if headers is None else headers,
            )
        )
        return response.code, json.loads(
            self.successResultOf(self.treq.content(response))
        )

    def test_status(self) -> None:
        """A process with a status serves it to requests with the secret."""
        url = _BASE + "status"
        self.assertEqual(self.send_request(url)[0], 404)
        resource = ReplicationResource(
            Directory(), "writer1", "hush", self.observer, status=lambda: b"{}"
        )
        self.treq = StubTreq(under_root(resource))
        self.assertEqual(self.send_request(url), (200, {}))
        self.assertEqual(self.send_request(url, headers={})[0], 401)
        self.assertEqual(self.send_request(url, method="POST")[0], 405)

    def test_page(self) -> None:
        """The rows in the range are returned as a page with its end."""
        self.assertEqual(
            self.send_request(),
            (
                200,
                {"updates": [[2, ["a"]], [3, ["b"]]], "upto_token": 3, "limited": True},
            ),
        )
        self.assertEqual(self.events.fetches, [("writer1", 1, 9)])

    def test_repeated(self) -> None:
        """A repeated request gets the same response, read from the stream again."""
        self.assertEqual(self.send_request(), self.send_request())
        self.assertEqual(self.events.fetches, [("writer1", 1, 9)] * 2)

    def test_empty_range(self) -> None:
        """A range that ends before it begins has no rows, and its end is echoed."""
        self.assertEqual(
            self.send_request(params={"from_token": "649", "upto_token": "0"}),
            (200, {"updates": [], "upto_token": 0, "limited": False}),
        )

    def test_secret(self) -> None:
        """A request without the secret gets 401, whether or not the stream exists."""
        for headers in ({}, {"Authorization": "Bearer hus"}, {"Authorization": "hush"}):
            for url in (_EVENTS, _BASE + "get_repl_stream_updates/unknown/abc"):
                status, body = self.send_request(url, headers=headers)
                self.assertEqual(status, 401)
                self.assertNotIn("hush", str(body))
        self.assertEqual(self.events.fetches, [])
        self.assertEqual(self.observer.refusals, {401: 6})

    def test_no_secret_configured(self) -> None:
        """If no secret is configured, none is required."""
        self.treq = self.make_treq(Directory(self.events), secret=None)
        self.assertEqual(self.send_request(headers={})[0], 200)

    def test_bad_parameters(self) -> None:
        """
        A parameter that is missing or not an integer is named in a response with 400.
        """
        for params, code, name in (
            ({"upto_token": "9"}, "M_MISSING_PARAM", "from_token"),
            ({"from_token": "1"}, "M_MISSING_PARAM", "upto_token"),
            ({"from_token": "x", "upto_token": "9"}, "M_INVALID_PARAM", "from_token"),
            ({"from_token": "1", "upto_token": "1e3"}, "M_INVALID_PARAM", "upto_token"),
            (
                {"from_token": "1", "upto_token": "9" * 5000},
                "M_INVALID_PARAM",
                "upto_token",
            ),
        ):
            status, body = self.send_request(params=params)
            self.assertEqual((status, body["errcode"]), (400, code))
            self.assertIn(name, body["error"])

    @settings(
        derandomize=True,
        deadline=None,
        max_examples=300,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        st.lists(st.binary(max_size=8), max_size=5),
        st.dictionaries(
            st.sampled_from(["from_token", "upto_token", "epoch", "backlog", "x"]),
            st.text(max_size=8)
            | st.integers().map(str)
            | st.sampled_from(["1", "3", "abc"]),
        ),
        st.sampled_from(["", "hush", "hus", "h\xfcsh"]),
    )
    def test_any_request(
        self, path: list[bytes], params: dict[str, str], secret: str
    ) -> None:
        """
        Any request gets rows or one clear error, never an internal failure, and rows
        only with the secret.
        """
        treq: Any = StubTreq(
            under_root(
                ReplicationResource(
                    Directory(self.events),
                    "writer1",
                    "hush",
                    self.observer,
                    epoch="abc",
                    backlog=Backlog(BacklogOptions()),
                )
            )
        )
        suffix = "/".join(quote(part, safe="") for part in path)
        for url in (_EVENTS, f"{_BASE}{suffix}"):
            response = self.successResultOf(
                treq.get(
                    url,
                    params=params,
                    headers={"Authorization": f"Bearer {secret}"},
                )
            )
            body = json.loads(self.successResultOf(treq.content(response)))
            self.assertNotIn("hush", str(body))
            counted, self.observer.refusals = self.observer.refusals, Counter()
            self.assertEqual(
                counted, {} if response.code == 200 else {response.code: 1}
            )
            if response.code == 200:
                self.assertEqual(secret, "hush")
                self.assertEqual(sorted(body), ["limited", "updates", "upto_token"])
            else:
                self.assertIn(response.code, (400, 401, 404, 409, 410))
                self.assertEqual(sorted(body), ["errcode", "error"])
                self.assertLess(len(body["error"]), 300)
        self.assertEqual(self.observer.failures, [])

    def test_unknown_stream(self) -> None:
        """A request for an unknown stream is answered with 400."""
        status, body = self.send_request(_BASE + "get_repl_stream_updates/%FF/abc")
        self.assertEqual((status, body["errcode"]), (400, "M_UNKNOWN"))

    def test_no_transaction_id(self) -> None:
        """Without the random id the path does not exist, as in stock Synapse."""
        for path in (
            "get_repl_stream_updates/events",
            "get_repl_stream_updates/events/",
            "other/events/abc",
            "get_repl_stream_updates/events/abc/more",
        ):
            self.assertEqual(self.send_request(_BASE + path)[0], 404)

    def test_other_methods(self) -> None:
        """Only GET is allowed."""
        for method in ("POST", "PUT", "DELETE"):
            self.assertEqual(self.send_request(method=method)[0], 405)

    def test_memory_of_another_process(self) -> None:
        """A stream in another process's memory is rejected with a hint."""
        url = _BASE + "get_repl_stream_updates/typing/abc"
        status, body = self.send_request(url)
        self.assertEqual(status, 400)
        self.assertIn("request it from the writer", body["error"])
        self.treq = self.make_treq(Directory(self.typing, writes=[self.typing]))
        self.assertEqual(self.send_request(url)[0], 200)

    def test_source_fails(self) -> None:
        """
        If fetching fails, the response is 500 with the reason, and the failure is
        reported.
        """
        self.events.error = CatchUpError("rows were forgotten")
        self.assertEqual(self.send_request()[1]["error"], "rows were forgotten")
        self.assertEqual(self.observer.failures, [self.events.error])

    def test_bug_is_not_shown(self) -> None:
        """The text of an unexpected error is reported, but not sent."""
        self.events.error = RuntimeError("password is 1234")
        status, body = self.send_request()
        self.assertEqual((status, body["error"]), (500, "internal error"))
        self.assertEqual(self.observer.failures, [self.events.error])

    def test_unencodable_row(self) -> None:
        """A row that cannot be encoded is skipped and reported."""
        self.events.rows = [(2, [float("nan"), None]), (3, ["b"])]
        status, body = self.send_request()
        self.assertEqual((status, body["updates"]), (200, [[3, ["b"]]]))
        (error,) = self.observer.failures
        self.assertIn("a row of events at 2 was skipped", str(error))

    def test_text_that_is_not_json(self) -> None:
        """A row that the database returns as invalid JSON is skipped and reported."""
        texts = EncodedUpdates([(2, '["\\ud800"]'), (3, '["b"]')])
        page = StreamUpdateResult(texts, 3, True)
        self.events.blocked_until = succeed(page)
        status, body = self.send_request()
        self.assertEqual((status, body["updates"]), (200, [[3, ["b"]]]))
        self.assertEqual(len(self.observer.failures), 1)

    def test_many_ask_for_the_same_rows(self) -> None:
        """A page is fetched once for all that ask meanwhile, errors included."""
        page = StreamUpdateResult([(2, ["a"])], 9, False)
        answers: list[tuple[StreamUpdateResult | CatchUpError, int]] = [
            (page, 200),
            (CatchUpError("too late"), 500),
        ]
        for answer, status in answers:
            pending: list[Deferred[StreamUpdateResult]] = [Deferred(), Deferred()]
            self.events.blocked_until = pending[0]
            self.events.fetches.clear()
            requests = [self.request_rows() for _ in range(3)]
            # It commits another row: the page that is being fetched may lack it.
            self.events.rows.append((self.events.rows[-1][0] + 1, ["new"]))
            self.events.blocked_until = pending[1]
            requests.append(self.request_rows())
            self.assertEqual(len(self.events.fetches), 2)
            for each in pending:
                if isinstance(answer, CatchUpError):
                    each.errback(answer)
                else:
                    each.callback(answer)
            self.treq.flush()
            codes = [self.successResultOf(each).code for each in requests]
            self.assertEqual(codes, [status] * 4)
            self.events.blocked_until = None
            self.assertEqual(self.send_request()[0], 200)
            self.assertEqual(len(self.events.fetches), 3)

    def request_rows(self) -> Any:
        return self.treq.request("GET", _EVENTS, params=_RANGE, headers=_SECRET)

    def test_client_disconnects(self) -> None:
        """
        A fetch that fails after the client disconnected is reported, without another
        error.
        """
        pending: Deferred[StreamUpdateResult] = Deferred()
        self.events.blocked_until = pending
        response = self.treq.request("GET", _EVENTS, params=_RANGE, headers=_SECRET)
        self.treq.flush()
        response.cancel()
        self.failureResultOf(response)
        self.treq.flush()
        self.events.blocked_until = None
        pending.errback(CatchUpError("too late"))
        self.assertEqual(len(self.observer.failures), 1)
