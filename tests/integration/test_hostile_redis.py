"""Tests for a server that is not Redis, or a hostile Redis."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from tests.integration.deployment import DeploymentTestCase

_CONFIRMED = b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%b\r\n:1\r\n"
_MESSAGE = b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n:5\r\n"


class HostileRedisTests(DeploymentTestCase):
    """Tests for a main process whose Redis answers with bytes that the test chooses."""

    def listen(self, answer: bytes) -> None:
        """Configure a Redis that answers each chunk of input with ``answer``."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        port = listener.getsockname()[1]
        self.shared["redis"] = {"enabled": True, "host": "127.0.0.1", "port": port}

        def serve(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                while connection.recv(65536):
                    connection.sendall(answer)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(
                        target=serve, args=(connection,), daemon=True
                    ).start()

        threading.Thread(target=accept, daemon=True).start()

    def check(self, reason: str) -> None:
        """Check that the link is closed for a reason, and that SIGTERM is obeyed."""
        main = self.start("main", self.main)
        self.wait_until(reason, lambda: reason in self.log_of("main"))
        started = time.monotonic()
        self.assertEqual(self.stop(main), 0)
        self.assertLess(time.monotonic() - started, 8.0)
        self.assertNotIn("Traceback", self.log_of("main"))

    def test_an_array_without_end(self) -> None:
        """An array of two billion items is rejected immediately."""
        self.listen(b"*2147483647\r\n:1\r\n")
        self.check("an array has more than 999 items")

    def test_messages_that_are_no_strings(self) -> None:
        """A message that is a number closes the link."""
        name = self.shared["server_name"].encode()
        extension = name + b"/replication_ext"
        channels = (extension, extension + b"/master", name, name + b"/USER_IP")
        confirmed = b"".join(_CONFIRMED % (len(each), each) for each in channels)
        self.listen(confirmed + _MESSAGE % (len(name), name))
        self.check("a message is not a string")
