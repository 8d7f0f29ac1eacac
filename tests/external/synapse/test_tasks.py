"""Tests for the homeserver's scheduled tasks, which workers start, run and cancel."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import eventually, new_deployment
from tests.support.synapse_process import WorkerSpec, ours

skip = skip_reason("synapse")

USERS = 4
ROOMS = 3


class ProfileTests(SynchronousTestCase):
    """Tests for the task that writes a new display name to each room."""

    def test_two_names_within_moments(self) -> None:
        """
        If a user changes the display name while the task for an earlier one is active,
        that task is cancelled; the requests succeed, and all rooms show the last name.
        """
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        deployment = new_deployment(
            redis,
            [WorkerSpec("background1", ("client",))],
            {},
            {"master": ours(), "background1": ours()},
            {"run_background_tasks_on": "background1"},
        )
        self.addCleanup(deployment.stop)
        deployment.start()
        bob = deployment.register("bob")
        users = [deployment.register(f"alice{number}") for number in range(USERS)]
        rooms = [(user, user.create_room(bob)) for user in users for _ in range(ROOMS)]
        for user in users:
            # Synapse fails by itself if a third name follows as quickly.
            user.set_display_name("one")
            user.set_display_name("two")

        def differing() -> object:
            shown = [
                user.call("GET", f"/rooms/{room}/joined_members")["joined"][
                    user.user_id
                ]
                for user, room in rooms
            ]
            return [each for each in shown if each["display_name"] != "two"]

        eventually("all rooms show the second name", differing)
        # Synapse itself logs errors of a task that was cancelled.
        self.assertNotIn("AttributeError", str(deployment.problems()))
