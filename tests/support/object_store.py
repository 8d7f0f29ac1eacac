"""A private S3 server, which the tests of a process share."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.private_process import free_port


@functools.cache
def _shared_server() -> str:
    """Start the server; return its URL once it responds.

    It takes some seconds to import its modules.
    """
    folder = Path(tempfile.mkdtemp(prefix="synapse-replication-s3-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    port = free_port()
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
        )
    atexit.register(server.wait)
    atexit.register(server.kill)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert server.poll() is None, (folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{url}/moto-api/", timeout=5):
                return url
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


def use_server(
    test: SynchronousTestCase, access_key: str = "key", secret_key: str = "hush"
) -> str:
    """Set the environment of a test for a server with an empty bucket ``bucket``.

    :return: the URL of the server.
    """
    url = _shared_server()
    environ = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_REGION": "us-east-1",
    }
    test.patch(os, "environ", {**os.environ, **environ})
    for method, path in (("POST", "moto-api/reset"), ("PUT", "bucket")):
        request = urllib.request.Request(f"{url}/{path}", method=method)
        with urllib.request.urlopen(request):
            pass
    return url
