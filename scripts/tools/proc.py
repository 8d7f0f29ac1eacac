"""Readers of ``/proc``: the CPU time and the memory of a process."""

from __future__ import annotations

import os
import re
from pathlib import Path


def processor_seconds(stat: str) -> float:
    """Return the user and system time of a process, in s.

    :param stat: the content of its ``/proc/PID/stat``.
    """
    # The process's name, in parentheses, may contain spaces.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mebibytes(pid: int) -> float:
    """Return the resident memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def proportional_mebibytes(pid: int) -> float:
    """Return the memory of a process, in MiB.

    It is the proportional set size: what several processes share, such as a library, is
    divided among them, so that the sum is the memory of all of them.
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8")
    (kibibytes,) = re.findall(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)
    return int(kibibytes) / 1024
