"""Tests for the client of the client API, against a small HTTP server."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.private_process import free_port
from tests.support.client_api import (
    ApiError,
    ApiUser,
    ClientApi,
    timeline_messages,
)


class _Answers(http.server.BaseHTTPRequestHandler):
    """Sends the same response to all requests, and records them."""

    def _answer(self) -> None:
        assert isinstance(self.server, _Server)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        self.server.requests.append((self.command, self.path, body))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.answer).encode())

    do_GET = do_POST = do_PUT = _answer  # noqa: N815 -- named by the base

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(http.server.HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.requests: list[tuple[str, str, bytes]] = []
        self.answer: Any = {}
        self.status = 200


class ClientApiTests(SynchronousTestCase):
    """Tests for ClientApi and ApiUser."""

    def setUp(self) -> None:
        self.server = _Server()
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        thread.start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(thread.join)
        self.addCleanup(self.server.shutdown)
        self.api = ClientApi("127.0.0.1", self.server.server_address[1])
        self.user = ApiUser(self.api, "@a:test", "DEV", "secret")

    def test_message(self) -> None:
        """A message is sent to its room with a new transaction id each time."""
        self.server.answer = {"event_id": "$1"}
        self.assertEqual(self.user.send_message("!r:test", "hi"), "$1")
        self.user.send_message("!r:test", "hi")
        (method, path, body), (_, other_path, _) = self.server.requests
        self.assertEqual(method, "PUT")
        self.assertTrue(
            path.startswith("/_matrix/client/v3/rooms/%21r%3Atest/send/m.room.message/")
        )
        self.assertNotEqual(path, other_path)
        self.assertEqual(json.loads(body), {"msgtype": "m.text", "body": "hi"})

    def test_refusal(self) -> None:
        """
        A rejected request raises an error with status and body, but without the token.
        """
        self.server.status = 403
        self.server.answer = {"errcode": "M_FORBIDDEN"}
        error = self.assertRaises(ApiError, self.user.join, "!r:test")
        self.assertEqual(error.status, 403)
        self.assertIn("M_FORBIDDEN", str(error))
        self.assertNotIn("secret", str(error) + repr(self.user))

    def test_health(self) -> None:
        """A process that responds is healthy; a port without a listener is not."""
        self.assertTrue(self.api.is_healthy())
        self.assertFalse(ClientApi("127.0.0.1", free_port()).is_healthy())

    def test_timeline_messages(self) -> None:
        """
        The texts of a room's messages are returned in order, without redacted messages.
        """
        events = [
            {"type": "m.room.message", "content": {"body": "1"}},
            {"type": "m.room.member", "content": {}},
            {"type": "m.room.message", "content": {}},
            {"type": "m.room.message", "content": {"body": "2"}},
        ]
        answer = {"rooms": {"join": {"!r:test": {"timeline": {"events": events}}}}}
        self.assertEqual(timeline_messages(answer, "!r:test"), ["1", "2"])
        self.assertEqual(timeline_messages(answer, "!other:test"), [])
