"""Processes of an earlier release and of this tree in one deployment.

The wheel of the earlier release is unpacked into a folder, from which its processes
import it; the libraries are those of this environment. The processes are divided into
two halves, of which each is the old one once. Configuration, positions, journals and
the extension are those of the release that wrote them.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from scripts.tools.faults import writer
from scripts.tools.faults.deployment import FaultDeployment
from scripts.tools.faults.run import Result, Settings, run_scenario
from scripts.tools.faults.scenarios import SCENARIOS, Scenario
from synapse_replication.demo.deployment import READERS, WRITERS

#: The halves of the processes: each has writers of both kinds, and a reader.
HALVES = (
    frozenset({*WRITERS[::2], *READERS[::2]}),
    frozenset({*WRITERS[1::2], *READERS[1::2]}),
)
#: The processes that are replaced. A writer of a stream in memory begins a new epoch,
#: after which its rows cannot be compared.
REPLACED = frozenset({*WRITERS, *READERS}) - {"typing_writer"}
#: The scenarios that are run, besides the upgrade and the way back.
NAMES = (
    "main-killed",
    "writer-killed",
    "reader-killed",
    "redis-killed",
    "subscription-cut",
    "tcp-writer-killed",
    "tcp-reader-killed",
)


def unpack(wheel: Path, folder: Path) -> list[str]:
    """Install a wheel, and the module of the writers, into a folder.

    :return: the command line of its ``synapse-replication``.
    :raises subprocess.CalledProcessError: if pip rejects the wheel.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True)
    module = folder.joinpath(*writer.__name__.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    shutil.copy(writer.__file__, module)
    return [
        *("env", f"--chdir={folder}", f"PYTHONPATH={folder}"),
        *(sys.executable, "-m", "synapse_replication"),
    ]


def _replace(names: frozenset[str], program: list[str]) -> Scenario:
    """Return a scenario that replaces processes, one at a time, by another release."""

    def cause(deployment: FaultDeployment, chance: random.Random) -> None:
        for name in sorted(names):
            deployment.stop(name)
            deployment.processes[name].program = program
            deployment.restart(name)

    return Scenario("replaced", cause)


def run_skew(
    wheel: Path,
    names: Sequence[str],
    settings: Settings,
    print_line: Callable[[str], None],
) -> list[Result]:
    """Run scenarios with each half of the processes from a wheel.

    :param names: the scenarios to run besides the upgrade and the way back; if empty,
        those that concern releases.
    """
    results = []
    current = [sys.executable, "-m", "synapse_replication"]
    with tempfile.TemporaryDirectory(prefix="skew-") as folder:
        old = unpack(wheel, Path(folder))
        for number, half in enumerate(HALVES):
            scenarios = {
                "upgraded": _replace(half & REPLACED, current),
                "downgraded": _replace(REPLACED - half, old),
                **{name: SCENARIOS[name] for name in names or NAMES},
            }
            for name, scenario in scenarios.items():
                label = f"{name}, half {number + 1} old"
                print_line(f"{label} ...")
                needs = attrs.evolve(scenario.needs, programs=dict.fromkeys(half, old))
                result = run_scenario(
                    attrs.evolve(scenario, needs=needs), settings, print_line
                )
                print_line(
                    f"{result.written} rows written, {result.lost} lost, "
                    f"{result.duplicated} duplicated {result.error}"
                )
                results.append(attrs.evolve(result, scenario=label))
    return results
