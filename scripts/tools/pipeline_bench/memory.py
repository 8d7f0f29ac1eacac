"""Measures the memory of Spark's processes, from outside. Linux only."""

from __future__ import annotations

import threading
from pathlib import Path

from typing_extensions import Self, override

#: The interval of samples, in s.
_INTERVAL = 0.1

#: The interval of samples of a tree of processes, which take longer, in s.
_TREE_INTERVAL = 0.5


class _Sampler:
    """A context in which a thread takes samples.

    :param interval: the interval of the samples, in s.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            self._take_sample()

    def _take_sample(self) -> None:
        raise NotImplementedError


class WorkerMemory(_Sampler):
    """A context that records the peak memory of each Python worker. Linux only.

    Workers are the children of ``pyspark.daemon``, and the processes that plan reads.

    :ivar most: the peak of the resident memory in KiB, by process id.
    """

    def __init__(self) -> None:
        super().__init__(_INTERVAL)
        self.most: dict[int, int] = {}

    @override
    def _take_sample(self) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            self._sample(process)

    def _sample(self, process: Path) -> None:
        try:
            if b"pyspark" not in (process / "cmdline").read_bytes():
                return
            status = (process / "status").read_text()
        except OSError:
            # The process has ended.
            return
        fields = dict(line.split(":\t", 1) for line in status.splitlines())
        if not fields["Name"].startswith("python"):
            return
        peak = int(fields.get("VmHWM", "0 kB").split()[0])
        pid = int(process.name)
        self.most[pid] = max(self.most.get(pid, 0), peak)


class TreeMemory(_Sampler):
    """A context that records the peak memory of a process and its descendants.

    :param pid: the id of the process.
    :ivar most_mib: the peak of the proportional set sizes, in MiB.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(_TREE_INTERVAL)
        self.most_mib = 0.0
        self._pid = pid

    @override
    def _take_sample(self) -> None:
        total = sum(map(_proportional_kib, _tree(self._pid)))
        self.most_mib = max(self.most_mib, total / 1024)


def _tree(pid: int) -> list[Path]:
    """Return the folders in ``/proc`` of a process and of its descendants."""
    found = [Path(f"/proc/{pid}")]
    for process in found:
        try:
            for task in process.glob("task/*/children"):
                found += [Path("/proc", child) for child in task.read_text().split()]
        except OSError:
            # The process has ended.
            continue
    return found


def _proportional_kib(process: Path) -> int:
    try:
        text = (process / "smaps_rollup").read_text()
    except OSError:
        return 0
    return int(text.partition("\nPss:")[2].split()[0] or 0)
