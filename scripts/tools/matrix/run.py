"""Environments of the rows, their tests, and the table of results."""

from __future__ import annotations

import csv
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from scripts.tools.matrix.rows import DISTRIBUTION, Row

ROOT = Path(__file__).parents[3]
#: The table, which docs/compatibility.rst includes.
TABLE = ROOT / "docs" / "compatibility.csv"
_HEADER = ("Component", "Version", "With", "Result", "Date")
_UV = (sys.executable, "-m", "uv")
_SUMMARY = re.compile(r"^(PASSED|FAILED) \((.*)\)$", re.MULTILINE)
_OWN_SUMMARY = re.compile(r"^stock \d+, ours \d+, lost (?P<lost>\d+)$", re.MULTILINE)
_COUNT = re.compile(r"(\w+)=(\d+)")
#: The packages that the column "With" names.
_SHOWN = (DISTRIBUTION, "Twisted")


class MatrixError(Exception):
    """The environment of a row cannot be created."""


@attrs.frozen
class Result:
    """The result of one row.

    :ivar installed: the versions with which the tests ran, for display.
    :ivar outcome: what each group of tests did, for display.
    """

    row: Row
    installed: str
    outcome: str
    is_good: bool


def create_environment(row: Row, cache: Path) -> Path:
    """Create or update the row's environment; return its Python.

    :raises MatrixError: with the messages of uv.
    """
    folder = cache / row.name
    python = folder / "bin" / "python"
    commands = []
    if not python.exists():
        commands.append([*_UV, "venv", "--quiet", "--python", row.python, str(folder)])
    commands.append(
        [
            *(*_UV, "pip", "install", "--quiet", "--python", str(python)),
            *(["--resolution", "lowest-direct"] if row.lowest else []),
            *("--editable", f"{ROOT}[postgres-binary,servers,otlp]"),
            *row.requirements,
        ]
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MatrixError(done.stderr.strip())
    return python


def run_row(row: Row, python: Path, logs: Path, timeout: float) -> Result:
    """Run the row's tests, and write their output to a file for each group.

    :param timeout: the time that one group may take, in s.
    """
    folder = str(logs / f"_trial_temp_{row.name}")
    # With the oldest Twisted, "python -m twisted.trial" fails, and trial does not
    # search this folder.
    trial = (str(python.parent / "trial"), "--rterrors", "--temp-directory", folder)
    commands = {label: (*trial, *names) for label, names in row.tests.items()}
    if row.own_tests:
        suite = (str(python), "-m", "scripts.tools.synapse_suite")
        commands["short"] = (*suite, "--short", "--jobs", "2")
    outcomes, is_good = [], True
    for label, command in commands.items():
        log = logs / f"{row.name}-{label}.log"
        with log.open("w") as output:
            try:
                status = subprocess.run(
                    command,
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(ROOT), **row.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                    timeout=timeout,
                ).returncode
            except subprocess.TimeoutExpired:
                status = 1
        counts, passed = summarize(log.read_text(errors="replace"))
        is_good = is_good and passed and status == 0
        outcomes.append(f"{label}: {counts}")
    return Result(row, _installed(python), "; ".join(outcomes), is_good)


def summarize(output: str) -> tuple[str, bool]:
    """Return the counts in a command's output, and whether no test failed.

    :param output: the output of trial, or of the homeserver's own tests.
    """
    if own := _OWN_SUMMARY.search(output):
        return own[0], own["lost"] == "0"
    found = list(_SUMMARY.finditer(output))
    if not found:
        return "did not end", False
    counts = {name: int(number) for name, number in _COUNT.findall(found[-1][2])}
    failed = counts.get("failures", 0) + counts.get("errors", 0)
    texts = [f"{counts.get('successes', 0)} passed"]
    if failed:
        texts.append(f"**{failed} failed**")
    if skipped := counts.get("skips", 0):
        texts.append(f"{skipped} skipped")
    return ", ".join(texts), found[-1][1] == "PASSED"


def _installed(python: Path) -> str:
    program = (
        "import importlib.metadata as m, platform\n"
        "print('Python', platform.python_version())\n"
        f"for name in {_SHOWN}:\n"
        "    try: print(name, m.version(name))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=True
    )
    return ", ".join(done.stdout.splitlines())


def update_table(results: Iterable[Result], path: Path = TABLE) -> None:
    """Replace the rows of these results in the table, and keep the others."""
    rows: dict[tuple[str, str], Mapping[str, str]] = {}
    if path.exists():
        with path.open(newline="") as file:
            rows = {
                (each["Component"], each["Version"]): each
                for each in csv.DictReader(file)
            }
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    for result in results:
        key = result.row.component, result.row.version
        values = (*key, result.installed, result.outcome, today)
        rows[key] = dict(zip(_HEADER, values, strict=True))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _HEADER, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows, key=_order))


def _order(key: tuple[str, str]) -> tuple[bool, str, list[int]]:
    component, version = key
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return not component.startswith("Synapse"), component, numbers
