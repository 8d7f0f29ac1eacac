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
    """What the two sides have in common."""

    def test_main(self) -> None:
        """A measure gets its parameters by name or by place, and its answer is JSON."""
        for text in ('{"count": 3}', "[3]"):
            self.patch(sys, "argv", ["side", "double", text])
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                main({"double": lambda count: {"seconds": 2 * count}})
            self.assertEqual(printed.getvalue(), '{"seconds": 6}\n')

    def test_percentiles(self) -> None:
        """Times in ms, in order, without the first tenth."""
        seconds = [9.0] * 10 + [n / 1000 for n in range(90, 0, -1)]
        self.assertEqual(percentiles(seconds), {"p50": 46.0, "p99": 90.0})

    def test_counting(self) -> None:
        """It fires with the last row, and with the first news of a writer."""
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
        """What is received begins with a greeting, and has every row once."""
        greeting, data = received_bytes(1000)
        self.assertTrue(greeting.startswith(b"SERVER "))
        lines = b"".join(data).splitlines()
        self.assertEqual(len(set(lines)), 1000)
        self.assertNotIn(READER.encode(), greeting)
        self.assertTrue(user_ip_line(7).startswith(b"USER_IP @user7:"))

    def test_the_other_end_goes(self) -> None:
        """A peer of a measure whose Redis is gone fails, and does not spin."""
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
