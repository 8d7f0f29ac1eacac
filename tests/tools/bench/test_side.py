"""Tests for :mod:`scripts.tools.bench.side`."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench.side import Counting, main, percentiles
from scripts.tools.bench.traffic import (
    READER,
    count_rows,
    received_bytes,
    user_ip_line,
)


class SideTests(SynchronousTestCase):
    """Tests for the code that both sides share."""

    def test_main(self) -> None:
        """A measure gets its parameters by name or by position, and prints JSON."""
        for text in ('{"count": 3}', "[3]"):
            self.patch(sys, "argv", ["side", "double", text])
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                main({"double": lambda count: {"seconds": 2 * count}})
            self.assertEqual(printed.getvalue(), '{"seconds": 6}\n')

    def test_percentiles(self) -> None:
        """Percentiles are in ms, without the first tenth of the times."""
        seconds = [9.0] * 10 + [n / 1000 for n in range(90, 0, -1)]
        self.assertEqual(percentiles(seconds), {"p50": 46.0, "p99": 90.0})

    def test_counting(self) -> None:
        """
        ``connected`` fires with the first position, and ``done`` with the last row.
        """
        counting = Counting(3)
        counting.position()
        counting.position()
        self.successResultOf(counting.connected)
        counting.count([1, 2])
        self.assertNoResult(counting.done)
        counting.count([3])
        self.successResultOf(counting.done)
        self.assertGreater(counting.finished, 0)

    def test_traffic(self) -> None:
        """The received bytes begin with a greeting and contain every row once."""
        greeting, data = received_bytes(1000)
        self.assertTrue(greeting.startswith(b"SERVER "))
        lines = b"".join(data).splitlines()
        self.assertEqual(len(set(lines)), 1000)
        self.assertNotIn(READER.encode(), greeting)
        self.assertTrue(user_ip_line(7).startswith(b"USER_IP @user7:"))

    def test_redis_disconnects(self) -> None:
        """A peer fails when its Redis disconnects."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]

            def serve() -> None:
                client, _ = listener.accept()
                with client:
                    client.recv(100)
                    client.sendall(b"*3\r\n$9\r\nsubscribe\r\n")

            thread = threading.Thread(target=serve)
            thread.start()
            with (
                contextlib.redirect_stdout(io.StringIO()),
                self.assertRaises(ConnectionError),
            ):
                count_rows(port, 10)
            thread.join()
