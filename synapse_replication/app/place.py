"""Where a process runs, for people."""

from __future__ import annotations

import os
import re
import socket

__all__ = ["this_place"]


def this_place() -> str:
    """Say where this process runs, in one word, for the others' operators."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return f"{host[:200]}:{os.getpid()}"
