"""A listening socket whose connections are served in threads."""

from __future__ import annotations

import contextlib
import socket
import threading


class SocketListener:
    """Serves each connection in a thread of its own.

    A subclass implements ``serve``, and calls ``__init__`` when it is ready to serve.

    :param listener: a listening socket.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        threading.Thread(target=self._accept, daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        """Serve a connection, and close it."""
        raise NotImplementedError

    def stop_listening(self) -> None:
        """Close the listener, but no connection. May be called twice."""
        # Only shutdown() wakes a thread in accept(); close() does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()
