"""A small client of the Matrix client API, for tests against a real homeserver.

All calls block, since a test of real processes waits for responses anyway. One
:class:`ClientApi` is one listener; one :class:`ApiUser` is one logged-in device.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import itertools
import json
import secrets
import urllib.parse
from collections.abc import Mapping
from typing import Any

import attrs

from synapse_replication.errors import ReplicationError

#: Timeout of a response, in s.
ANSWER_TIMEOUT = 60.0


class ApiError(ReplicationError):
    """Raised if the homeserver rejects a request.

    :ivar status: the HTTP status.
    :ivar body: the beginning of the response.
    """

    def __init__(self, method: str, path: str, status: int, body: str) -> None:
        super().__init__(f"{method} {path} answered {status}: {body[:400]}")
        self.status = status
        self.body = body


@attrs.frozen
class ClientApi:
    """A listener that serves the client API.

    :ivar host: a name or an address.
    :ivar port: its TCP port.
    """

    host: str
    port: int

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """Send one request and return the JSON value of its response.

        :raises ApiError: if the status is not 200.
        :raises OSError: if the connection failed or broke.
        """
        if query:
            path = f"{path}?{urllib.parse.urlencode(query)}"
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection(
            self.host, self.port, timeout=ANSWER_TIMEOUT
        )
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            answer = response.read().decode("utf-8", "replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ApiError(method, path, response.status, answer)
        return json.loads(answer)

    def is_healthy(self) -> bool:
        """Return whether the process behind the listener is up."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=2.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def register(self, name: str, shared_secret: str) -> ApiUser:
        """Create a user with the registration shared secret.

        :param name: the local part of the new user's id.
        """
        path = "/_synapse/admin/v1/register"
        nonce = self.request("GET", path)["nonce"]
        password = secrets.token_hex(8)
        message = "\0".join((nonce, name, password, "notadmin"))
        mac = hmac.new(shared_secret.encode(), message.encode(), hashlib.sha1)
        answer = self.request(
            "POST",
            path,
            {
                "nonce": nonce,
                "username": name,
                "password": password,
                "admin": False,
                "mac": mac.hexdigest(),
            },
        )
        return ApiUser(
            self, answer["user_id"], answer["device_id"], answer["access_token"]
        )


@attrs.frozen
class ApiUser:
    """One logged-in device of a user.

    :ivar api: the listener to which its requests are sent.
    """

    api: ClientApi
    user_id: str
    device_id: str
    access_token: str = attrs.field(repr=False)
    _transactions: itertools.count[int] = attrs.field(
        factory=itertools.count, repr=False
    )

    def at(self, api: ClientApi) -> ApiUser:
        """Return the same device, connected to another listener."""
        return attrs.evolve(self, api=api)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request below ``/_matrix/client/v3``."""
        return self.api.request(
            method,
            f"/_matrix/client/v3{path}",
            body,
            token=self.access_token,
            query=query,
        )

    def _transaction(self) -> str:
        return f"{self.device_id}.{next(self._transactions)}.{secrets.token_hex(4)}"

    def create_room(self, *invited: ApiUser) -> str:
        """Create a public room and return its id."""
        answer = self.call(
            "POST",
            "/createRoom",
            {
                "preset": "public_chat",
                "invite": [user.user_id for user in invited],
            },
        )
        return str(answer["room_id"])

    def join(self, room_id: str) -> None:
        """Join a room."""
        self.call("POST", f"/join/{_quote(room_id)}", {})

    def send_message(
        self, room_id: str, text: str, transaction: str | None = None
    ) -> str:
        """Send a text message and return the id of its event.

        :param transaction: the id of a request that is sent again, perhaps after its
            answer was lost: the message is sent once.
        """
        transaction = transaction or self._transaction()
        answer = self.call(
            "PUT",
            f"/rooms/{_quote(room_id)}/send/m.room.message/{transaction}",
            {"msgtype": "m.text", "body": text},
        )
        return str(answer["event_id"])

    def create_note(self, room_id: str, text: str) -> str:
        """Send an event that is not a message, and return its id."""
        answer = self.call(
            "PUT",
            f"/rooms/{_quote(room_id)}/send/org.example.note/{self._transaction()}",
            {"body": text},
        )
        return str(answer["event_id"])

    def redact(self, room_id: str, event_id: str) -> str:
        """Redact an event and return the id of the redaction."""
        answer = self.call(
            "PUT",
            f"/rooms/{_quote(room_id)}/redact/{_quote(event_id)}/{self._transaction()}",
            {},
        )
        return str(answer["event_id"])

    def set_typing(self, room_id: str, typing: bool = True) -> None:
        """Report that the user is typing, for 20 s, or has stopped."""
        self.call(
            "PUT",
            f"/rooms/{_quote(room_id)}/typing/{_quote(self.user_id)}",
            {"typing": typing, "timeout": 20_000} if typing else {"typing": False},
        )

    def read_up_to(self, room_id: str, event_id: str) -> None:
        """Send a read receipt."""
        self.call(
            "POST", f"/rooms/{_quote(room_id)}/receipt/m.read/{_quote(event_id)}", {}
        )

    def set_presence(self, presence: str, status: str = "") -> None:
        """Set the presence: ``online``, ``unavailable`` or ``offline``."""
        self.call(
            "PUT",
            f"/presence/{_quote(self.user_id)}/status",
            {"presence": presence, "status_msg": status},
        )

    def set_account_data(self, kind: str, content: Any) -> None:
        """Store account data of a type."""
        self.call("PUT", f"/user/{_quote(self.user_id)}/account_data/{kind}", content)

    def set_room_tag(self, room_id: str, tag: str) -> None:
        """Tag a room, which is account data of the room."""
        self.call(
            "PUT",
            f"/user/{_quote(self.user_id)}/rooms/{_quote(room_id)}/tags/{tag}",
            {"order": 0.5},
        )

    def set_push_rule(self, pattern: str) -> None:
        """Add a push rule for messages that contain a word."""
        self.call(
            "PUT",
            f"/pushrules/global/content/{_quote(pattern)}",
            {"pattern": pattern, "actions": ["notify"]},
        )

    def set_pusher(self, push_key: str) -> None:
        """Add a pusher."""
        self.call(
            "POST",
            "/pushers/set",
            {
                "app_display_name": "test",
                "app_id": "org.example.test",
                "data": {"url": "https://localhost/_matrix/push/v1/notify"},
                "device_display_name": "test",
                "kind": "http",
                "lang": "en",
                "pushkey": push_key,
            },
        )

    def set_display_name(self, name: str) -> None:
        """Change the profile, which changes the member event of each joined room."""
        self.call(
            "PUT", f"/profile/{_quote(self.user_id)}/displayname", {"displayname": name}
        )

    def send_to_device(self, other: ApiUser, text: str) -> None:
        """Send a message to a device."""
        self.call(
            "PUT",
            f"/sendToDevice/org.example.test/{self._transaction()}",
            {"messages": {other.user_id: {other.device_id: {"body": text}}}},
        )

    def upload_device_keys(self) -> None:
        """Upload identity keys and one-time keys; they are random, unsigned bytes."""
        key = secrets.token_urlsafe(32)
        self.call(
            "POST",
            "/keys/upload",
            {
                "device_keys": {
                    "algorithms": ["m.olm.v1.curve25519-aes-sha2"],
                    "device_id": self.device_id,
                    "keys": {
                        f"curve25519:{self.device_id}": key,
                        f"ed25519:{self.device_id}": key,
                    },
                    "signatures": {
                        self.user_id: {f"ed25519:{self.device_id}": secrets.token_hex()}
                    },
                    "user_id": self.user_id,
                },
                "one_time_keys": {f"curve25519:{secrets.token_hex(3)}": key},
            },
        )

    def sync(
        self, since: str | None = None, timeout_ms: int = 0, limit: int = 10_000
    ) -> dict[str, Any]:
        """Call ``/sync`` once and return its whole response.

        :param limit: the greatest number of events per room.
        """
        query = {
            "timeout": str(timeout_ms),
            "filter": json.dumps({"room": {"timeline": {"limit": limit}}}),
        }
        if since is not None:
            query["since"] = since
        answer = self.call("GET", "/sync", query=query)
        assert isinstance(answer, dict)
        return answer


def timeline_messages(answer: Mapping[str, Any], room_id: str) -> list[str]:
    """Return the texts of a room in a response of ``/sync``, in order."""
    room = answer.get("rooms", {}).get("join", {}).get(room_id, {})
    return [
        event["content"]["body"]
        for event in room.get("timeline", {}).get("events", [])
        if event["type"] == "m.room.message" and "body" in event["content"]
    ]


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe="")
