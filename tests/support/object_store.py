"""A private S3 server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start an S3 server; return it and its URL once it responds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "s3.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert server.poll() is None, (folder / "s3.log").read_text()
        try:
            with urllib.request.urlopen(f"{url}/moto-api/", timeout=5):
                return server, url
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")
