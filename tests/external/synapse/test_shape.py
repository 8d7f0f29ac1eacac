"""A deployment of a real shape, driven over the API on stock, on ours, and mixed.

Twelve processes: main, two persisters, a second stream writer, and workers that send
pushes, talk to an application service, send to other servers, run background tasks,
serve media, update the user directory, and serve ``/sync``. The same requests are sent
to each deployment. The statuses of all responses, what ``/sync`` shows, and the errors
in the logs are then compared with those of stock.

``SYNAPSE_REPLICATION_SHAPE_ROUNDS`` is the number of rounds of requests; each takes
about ten seconds on an idle machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
import psycopg2
import yaml
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import PATIENCE, eventually, new_deployment
from tests.support.client_api import ApiError, ApiUser
from tests.support.synapse_peer import SynapseDeployment
from tests.support.synapse_process import Launcher, WorkerSpec, ours

skip = skip_reason("synapse")

ROUNDS = int(os.environ.get("SYNAPSE_REPLICATION_SHAPE_ROUNDS", "2"))

_WORKERS = (
    *(WorkerSpec(f"persister{number}", ("client",)) for number in (1, 2)),
    WorkerSpec("writer1", ("client",)),
    WorkerSpec("pusher1"),
    WorkerSpec("federation1"),
    WorkerSpec("appservice1"),
    WorkerSpec("background1", ("client",)),
    WorkerSpec("directory1", ("client",)),
    WorkerSpec("media1", ("media",), {"enable_media_repo": True}),
    WorkerSpec("sync1", ("client",)),
    WorkerSpec("sync2", ("client",)),
)
_NAMES = ("master", *(spec.name for spec in _WORKERS))
_STREAM_WRITERS = {
    "events": ["persister1", "persister2"],
    "typing": ["writer1"],
    "receipts": ["writer1"],
    "to_device": ["writer1"],
    "account_data": ["writer1"],
    "presence": ["writer1"],
}
_SETTINGS = {
    "pusher_instances": ["pusher1"],
    "federation_sender_instances": ["federation1"],
    "notify_appservices_from_worker": "appservice1",
    "run_background_tasks_on": "background1",
    "update_user_directory_from_worker": "directory1",
    "enable_media_repo": False,
    "media_instance_running_background_jobs": "media1",
    "ip_range_blacklist": [],
    "user_directory": {"enabled": True, "search_all_users": True},
    "enable_room_list_search": True,
    "allow_profile_lookup_over_federation": False,
}

#: What differs from run to run in a line of a log.
_VARIABLE = re.compile(
    r"(?<=/rooms/)[^/' ]+|\$[\w-]{20,}|![\w:.-]{10,}|0x[0-9a-f]+|@[\w.-]+:[\w.]+"
    r"|\b[A-Za-z]{12,}\b(?=')|\d+"
)


#: Errors of Synapse itself, which depend on when a task is cancelled, or on what else
#: writes while a room is purged.
_OF_SYNAPSE = (
    "dropped without being released",
    "Background process 'task-update_join_states' threw an exception",
    "scheduled task ",
)
#: The error of a purged room in whose transaction another table refers to it again.
_STILL_REFERENCED = "violates foreign key constraint"


class _PushGateway:
    """Receives the pushes, and the events for the application service."""

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                gateway.paths[self.path.split("?")[0].rpartition("/")[0]] += 1
                body = json.dumps({"rejected": []}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_GET = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        """Stop receiving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@attrs.define
class Observations:
    """What was observed of one deployment.

    :ivar statuses: the name of each request and the status of its response, in order.
    :ivar shown: what ``/sync`` shows to each user.
    :ivar errors: the process, logger and text of each error in a log.
    """

    statuses: list[tuple[str, int]] = attrs.Factory(list)
    shown: dict[str, Any] = attrs.Factory(dict)
    errors: Counter[tuple[str, str]] = attrs.Factory(Counter)


@attrs.define
class Course:
    """The requests of one run."""

    deployment: SynapseDeployment
    gateway: _PushGateway
    seen: Observations = attrs.Factory(Observations)
    users: list[ApiUser] = attrs.Factory(list)

    def attempt(self, name: str, request: Callable[..., Any], *arguments: Any) -> Any:
        """Send a request and record its status; return the response, if it succeeds."""
        try:
            answer = request(*arguments)
        except ApiError as error:
            self.seen.statuses.append((name, error.status))
            return None
        self.seen.statuses.append((name, 200))
        return answer

    def at(self, user: ApiUser, worker: str) -> ApiUser:
        """Return a user who is connected to a worker."""
        return user.at(self.deployment.processes[worker].api)

    def admin(self, name: str, method: str, path: str, body: Any = None) -> Any:
        """Send a request to the admin API."""
        admin = self.users[0]
        return self.attempt(
            name,
            lambda: admin.api.request(
                method, f"/_synapse/admin{path}", body, token=admin.access_token
            ),
        )

    def until_complete(self, name: str, path: str) -> None:
        """Wait until a task of the admin API is complete.

        Another process runs it: at first, it is unknown to the one that is asked. The
        homeserver's scheduler sometimes begins a task only when it looks for tasks
        once a minute, on stock, too. It also leaves a lock of a room behind if it
        cancels a task at a wrong moment, because a name changed twice; the next task
        waits until that lock has expired, after two minutes.
        """

        def pending() -> object:
            admin = self.users[0]
            try:
                answer = admin.api.request(
                    "GET", f"/_synapse/admin{path}", token=admin.access_token
                )
            except ApiError as error:
                return str(error)
            results = answer.get("results", [answer])
            states = [each["status"] for each in results]
            return [each for each in states if each not in ("complete", "failed")]

        eventually(name, pending, 4 * PATIENCE)
        answer = self.admin(name, "GET", path)
        for each in answer.get("results", [answer]):
            is_race = _STILL_REFERENCED in str(each.get("error"))
            state = "complete" if is_race else each["status"]
            self.seen.statuses.append((f"{name} {state}", 200))

    def begin(self) -> None:
        """Register the users; the first one is an administrator."""
        self.users = [self.deployment.register(f"user{number}") for number in range(4)]
        connection = psycopg2.connect(**self.deployment.database)
        with contextlib.closing(connection), connection, connection.cursor() as cursor:
            cursor.execute(
                "UPDATE users SET admin = 1 WHERE name = %s", (self.users[0].user_id,)
            )
        self.attempt(
            "pusher",
            lambda: self.users[1].call(
                "POST",
                "/pushers/set",
                {
                    "kind": "http",
                    "app_id": "org.example.app",
                    "pushkey": "key",
                    "app_display_name": "a",
                    "device_display_name": "b",
                    "lang": "en",
                    "data": {"url": f"{self.gateway.url}/_matrix/push/v1/notify"},
                },
            ),
        )

    def one_round(self, number: int) -> None:
        """Use every feature once."""
        alice, bob, carol = self.users[1:]
        writer = self.at(alice, "writer1")
        room = self.attempt("createRoom", lambda: alice.create_room(bob, carol))
        for user in (bob, carol):
            self.attempt("join", user.join, room)
        events = [
            self.attempt("send", bob.send_message, room, f"{number}.{n} user1")
            for n in range(5)
        ]
        self.attempt("redact", lambda: bob.redact(room, events[0]))
        self.attempt("typing", lambda: writer.set_typing(room))
        self.attempt("receipt", lambda: writer.read_up_to(room, events[-1]))
        self.attempt("presence", lambda: writer.set_presence("online", f"r{number}"))
        self.attempt(
            "account data", lambda: writer.set_account_data("a.b", {"n": number})
        )
        self.attempt("tag", lambda: writer.set_room_tag(room, f"u.{number}"))
        self.attempt("push rule", lambda: alice.set_push_rule(f"word{number}"))
        self.attempt("to-device", lambda: writer.send_to_device(bob, f"hello {number}"))
        self.attempt("keys", alice.upload_device_keys)
        for name in ("one", "two"):
            self.attempt("name", carol.set_display_name, name)
        quoted = urllib.parse.quote(room, safe="")
        for name, user, method, path, body in (
            ("alias", alice, "PUT", f"/directory/room/%23a{number}%3Arepl.test",
             {"room_id": room}),
            ("directory", bob, "POST", "/user_directory/search",
             {"search_term": "user"}),
            ("public rooms", bob, "GET", "/publicRooms", None),
            ("search", bob, "POST", "/search",
             {"search_categories": {"room_events": {"search_term": "hello"}}}),
            ("messages", bob, "GET", f"/rooms/{quoted}/messages?dir=b", None),
            ("members", bob, "GET", f"/rooms/{quoted}/joined_members", None),
            ("state", bob, "GET", f"/rooms/{quoted}/state", None),
            ("topic", alice, "PUT", f"/rooms/{quoted}/state/m.room.topic",
             {"topic": f"t{number}"}),
            ("kick", alice, "POST", f"/rooms/{quoted}/kick",
             {"user_id": carol.user_id}),
            ("ban", alice, "POST", f"/rooms/{quoted}/ban", {"user_id": carol.user_id}),
            ("unban", alice, "POST", f"/rooms/{quoted}/unban",
             {"user_id": carol.user_id}),
            ("upgrade", alice, "POST", f"/rooms/{quoted}/upgrade",
             {"new_version": "10"}),
            ("devices", bob, "GET", "/devices", None),
            ("notifications", alice, "GET", "/notifications", None),
            ("unknown room", bob, "GET", "/rooms/%21none%3Arepl.test/state", None),
        ):  # fmt: skip
            self.attempt(name, user.call, method, path, body)
        self._administer(number, quoted)

    def _administer(self, number: int, room: str) -> None:
        bob = self.users[2].user_id
        for name, path in (
            ("users", "/v2/users"),
            ("user", f"/v2/users/{bob}"),
            ("rooms", "/v1/rooms"),
            ("room", f"/v1/rooms/{room}"),
            ("members of", f"/v1/rooms/{room}/members"),
            ("joined", f"/v1/users/{bob}/joined_rooms"),
            ("whois", f"/v1/whois/{bob}"),
            ("destinations", "/v1/federation/destinations"),
            ("updates", "/v1/background_updates/status"),
            ("statistics", "/v1/statistics/users/media"),
            ("reports", "/v1/event_reports"),
            ("tokens", "/v1/registration_tokens"),
            ("pushers of", f"/v1/users/{self.users[1].user_id}/pushers"),
            ("version", "/v1/server_version"),
        ):
            self.admin(name, "GET", path)
        purge = self.admin(
            "purge", "POST", f"/v1/purge_history/{room}",
            {"purge_up_to_ts": 2**42, "delete_local_events": True},
        )  # fmt: skip
        if purge is not None:
            path = f"/v1/purge_history_status/{purge['purge_id']}"
            self.until_complete("purged", path)
        redact = self.admin(
            "redact all", "POST", f"/v1/user/{bob}/redact", {"rooms": []}
        )
        if redact is not None:
            path = f"/v1/user/redact_status/{redact['redact_id']}"
            self.until_complete("redacted all", path)
        if number % 2:
            gone = self.admin("delete", "DELETE", f"/v2/rooms/{room}", {"purge": True})
            if gone is not None:
                self.until_complete("deleted", f"/v2/rooms/{room}/delete_status")

    def finish(self) -> None:
        """Record what ``/sync`` shows to each user, and stop the deployment."""
        last = self.users[1].create_room(*self.users[2:])
        for user in self.users[2:]:
            user.join(last)
        event = self.users[1].send_message(last, "the last one")
        for worker in ("sync1", "sync2"):
            for user in self.users[1:]:
                self._wait_for(self.at(user, worker), last, event)
        for user in self.users[1:]:
            self.seen.shown[user.user_id] = _summarize(self.at(user, "sync1").sync())
        self.deployment.halt()
        for name, process in self.deployment.processes.items():
            text = process.log.read_text("utf-8", "replace")
            self.seen.errors.update((name, line) for line in _errors(text))

    def _wait_for(self, user: ApiUser, room: str, event: str) -> None:
        """Wait until ``/sync`` shows an event to a user."""

        def missing() -> bool:
            joined = user.sync()["rooms"]["join"]
            timeline = joined.get(room, {}).get("timeline", {}).get("events", [])
            return all(each["event_id"] != event for each in timeline)

        eventually("the last event", missing)


def _summarize(answer: Mapping[str, Any]) -> Any:
    """Return the parts of a response of ``/sync`` that do not differ by chance."""
    rooms = answer.get("rooms", {})
    return {
        "joined": sorted(
            (
                sorted(each["type"] for each in room["state"]["events"]),
                [each["type"] for each in room["timeline"]["events"]],
                sorted(each["type"] for each in room["account_data"]["events"]),
            )
            for room in rooms.get("join", {}).values()
        ),
        "left": len(rooms.get("leave", {})),
        "invited": len(rooms.get("invite", {})),
        "account data": sorted(
            json.dumps(each, sort_keys=True)
            for each in answer.get("account_data", {}).get("events", [])
            if each["type"] != "m.push_rules"
        ),
        "to-device": [
            each["content"] for each in answer.get("to_device", {}).get("events", [])
        ],
    }


def _errors(log: str) -> Iterator[str]:
    """Yield the errors in a log, without what differs from run to run."""
    for line in log.splitlines():
        parts = line.split(" - ", 5)
        is_error = len(parts) == 6 and parts[3] in ("ERROR", "CRITICAL")
        if is_error and not any(text in line for text in _OF_SYNAPSE):
            yield _VARIABLE.sub("*", f"{parts[1]}: {parts[5]}")


class ShapeTests(SynchronousTestCase):
    """Tests that compare deployments of a real shape."""

    def observe(self, launchers: Mapping[str, Launcher]) -> Observations:
        """Run a deployment, send all requests to it, and stop it."""
        redis = PrivateRedis().start()
        gateway = _PushGateway()
        self.addCleanup(redis.stop)
        self.addCleanup(gateway.stop)
        deployment = new_deployment(
            redis, _WORKERS, _STREAM_WRITERS, launchers, self._settings(gateway)
        )
        self.addCleanup(deployment.stop)
        deployment.start()
        course = Course(deployment, gateway)
        course.begin()
        for number in range(ROUNDS):
            course.one_round(number)
        eventually(
            "a push and an event for the service", lambda: len(gateway.paths) < 2
        )
        course.finish()
        return course.seen

    def _settings(self, gateway: _PushGateway) -> dict[str, Any]:
        path = self.mktemp()
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(
                {
                    "id": "bridge",
                    "url": gateway.url,
                    "as_token": "a",
                    "hs_token": "b",
                    "sender_localpart": "bridge",
                    "namespaces": {
                        "users": [{"exclusive": False, "regex": "@user.*"}],
                        "aliases": [],
                        "rooms": [],
                    },
                },
                file,
            )
        return {**_SETTINGS, "app_service_config_files": [os.path.abspath(path)]}

    def test_like_stock(self) -> None:
        """
        All on ours, and half of the processes on ours, behave as stock: the statuses
        and what ``/sync`` shows are equal, and no log has an error that stock has not.
        """
        stock = self.observe({})
        known = {text for _, text in stock.errors}
        for names in (_NAMES, _NAMES[::2]):
            seen = self.observe({name: ours() for name in names})
            differing = [
                (one, other)
                for one, other in zip(stock.statuses, seen.statuses, strict=False)
                if one != other
            ]
            self.assertEqual(differing, [])
            self.assertEqual(len(seen.statuses), len(stock.statuses))
            self.assertEqual(seen.shown, stock.shown)
            new = {each: n for each, n in seen.errors.items() if each[1] not in known}
            self.assertEqual(new, {}, new)
