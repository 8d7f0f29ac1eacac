"""A private S3 server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase


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


def use_server(test: SynchronousTestCase) -> None:
    """Start a server with a bucket ``bucket``, and set the environment for a test."""
    folder = Path(test.mktemp()).absolute()
    folder.mkdir()
    server, url = start_server(folder)
    test.addCleanup(server.wait)
    test.addCleanup(server.kill)
    environ = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "AWS_REGION": "us-east-1",
    }
    test.patch(os, "environ", {**os.environ, **environ})
    request = urllib.request.Request(f"{url}/bucket", method="PUT")
    with urllib.request.urlopen(request):
        pass
