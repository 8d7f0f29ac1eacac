"""Tests for :mod:`synapse_replication.app.place`."""

from __future__ import annotations

import os
import socket

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.place import this_place


class ThisPlaceTests(SynchronousTestCase):
    """What a process says of where it runs."""

    def test_one_word(self) -> None:
        """Whatever the machine is called, it is one bounded word with the pid."""
        self.patch(socket, "gethostname", lambda: "a host\n" + "x" * 300)
        place = this_place()
        self.assertEqual(place, f"a_host_{'x' * 193}:{os.getpid()}")
