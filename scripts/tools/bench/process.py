"""Measures what a stand-alone process costs before it does anything: its modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.tools.bench.runner import BenchError
from scripts.tools.bench.tasks import Result, Task, Unit

#: The name for ``--only``.
NAME = "process"

#: The number of packages whose cost is printed, the most expensive first.
SHOWN = 20
_ROOT = Path(__file__).resolve().parents[3]

#: Loads what ``synapse-replication worker`` loads, and attributes the resident memory
#: and the CPU time of each module, without those that it imports, to its package.
_LOAD = """
import json, resource, sys, time
from collections import Counter
from importlib.machinery import ExtensionFileLoader, SourceFileLoader

def kibibytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024

memory, spent, nested = Counter(), Counter(), []

def measured(execute):
    def exec_module(loader, module):
        before = kibibytes(), time.process_time()
        nested.append([0, 0.0])
        try:
            execute(loader, module)
        finally:
            grown, took = kibibytes() - before[0], time.process_time() - before[1]
            inner = nested.pop()
            if nested:
                nested[-1][0] += grown
                nested[-1][1] += took
            parts = module.__name__.split(".")
            package = ".".join(parts[: 2 if parts[0] in SPLIT else 1])
            memory[package] += grown - inner[0]
            spent[package] += took - inner[1]
    return exec_module

SPLIT = ("synapse_replication", "twisted")
if sys.argv[1:]:
    for loader in (SourceFileLoader, ExtensionFileLoader):
        loader.exec_module = measured(loader.exec_module)
import twisted.internet.reactor
import synapse_replication.app.service
import synapse_replication.cli.main
import synapse_replication.config.process
print(json.dumps({
    "mebibytes": kibibytes() / 1024,
    "cpu": time.process_time(),
    "modules": len(sys.modules),
    "packages": [(k, v, spent[k]) for k, v in memory.most_common()],
}))
"""


def measure_process(
    other: Path, rounds: int, print_line: Callable[[str], object]
) -> list[Result]:
    """Load a process of this checkout and one of another, alternately.

    :param other: another checkout.
    :return: the CPU time and the resident memory.
    """
    found: dict[Unit, tuple[list[float], list[float]]] = {
        Unit.CPU_SECONDS: ([], []),
        Unit.MEBIBYTES: ([], []),
    }
    for root in (_ROOT, other):
        # The first one may have to compile the modules.
        _load(root)
    for _ in range(rounds):
        for side, root in enumerate((_ROOT, other)):
            answer = _load(root)
            found[Unit.CPU_SECONDS][side].append(answer["cpu"])
            found[Unit.MEBIBYTES][side].append(answer["mebibytes"])
    packages = _load(_ROOT, "packages")["packages"]
    for package, kibibytes, seconds in packages[:SHOWN]:
        print_line(f"{package:36} {kibibytes:6} KiB {seconds * 1000:6.1f} ms")
    return [
        Result(
            Task(name=NAME, group=NAME, measure=NAME, count=1, quick_count=1),
            unit,
            *pair,
        )
        for unit, pair in found.items()
    ]


def _load(root: Path, *arguments: str) -> dict[str, Any]:
    # Otherwise, each process would compile the modules, and measure that, too.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *arguments],
        capture_output=True,
        check=False,
        cwd=root,
        env=environ,
    )
    if done.returncode:
        raise BenchError(done.stderr.decode("utf-8", "replace")[-2000:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
