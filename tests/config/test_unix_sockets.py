"""Tests for listeners on Unix sockets that a killed process has left behind."""

from __future__ import annotations

import os
import socket
import stat
from typing import Any

from twisted.internet import reactor  # noqa: TID251
from twisted.internet.error import CannotListenError
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase

from synapse_replication.config.unix_sockets import UnixSocketEndpoint
from synapse_replication.transport.reactor import as_reactor
from tests.support.config_files import FilesMixin


class UnixSocketEndpointTests(FilesMixin, TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = os.path.relpath(self.folder / "s")

    async def listen(self, mode: int = 0o600) -> Any:
        endpoint = UnixSocketEndpoint(as_reactor(reactor), self.path, mode)
        port = await endpoint.listen(Factory.forProtocol(Protocol))
        self.addCleanup(port.stopListening)
        return port

    async def test_mode(self) -> None:
        """The socket has the permissions of the endpoint."""
        for mode in (0o600, 0o660, 0o666):
            port = await self.listen(mode)
            self.assertEqual(stat.S_IMODE(os.stat(self.path).st_mode), mode)
            await port.stopListening()
            self.assertFalse(os.path.exists(self.path))

    async def test_left_behind(self) -> None:
        """A socket and a lock of a killed process are replaced, whatever its id."""
        for owner in (1, os.getpid(), 2**22):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(self.path)
            os.symlink(str(owner), f"{self.path}.lock")
            port = await self.listen()
            await port.stopListening()
            self.assertFalse(os.path.lexists(f"{self.path}.lock"))

    async def test_lock_only(self) -> None:
        """A lock without a socket is replaced, too."""
        os.symlink("1", f"{self.path}.lock")
        await self.listen()

    async def test_in_use(self) -> None:
        """A socket on which a process listens is not taken from it."""
        await self.listen()
        with self.assertRaises(CannotListenError) as caught:
            await self.listen()
        self.assertIn("another process listens on it", str(caught.exception))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.path)

    async def test_replaced(self) -> None:
        """
        A process that ends leaves the socket of its successor; its own stays open until
        then, so that the number of its file is not used again.
        """
        predecessor = await self.listen()
        os.unlink(self.path)
        await self.listen()
        await predecessor.stopListening()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.path)

    async def test_removed(self) -> None:
        """A socket that someone has removed does not prevent a clean end."""
        port = await self.listen()
        os.unlink(self.path)
        await port.stopListening()
        self.assertFalse(port.connected)

    async def test_no_socket(self) -> None:
        """A file that is no socket is not removed."""
        self.write("s", "precious")
        with self.assertRaises(CannotListenError) as caught:
            await self.listen()
        self.assertIn("not a socket", str(caught.exception))
        self.assertTrue(os.path.exists(self.path))

    async def test_no_folder(self) -> None:
        """A missing folder is an error of listening."""
        self.path += "/missing/s"
        with self.assertRaises(CannotListenError):
            await self.listen()
