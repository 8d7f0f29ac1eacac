"""Measures the memory of Spark's Python workers, from outside."""

from __future__ import annotations

import threading
from pathlib import Path

#: The interval of samples, in s.
_INTERVAL = 0.1


class WorkerMemory:
    """A context that records the peak memory of each Python worker. Linux only.

    Workers are the children of ``pyspark.daemon``, and the processes that plan reads.

    :ivar most: the peak of the resident memory in KiB, by process id.
    """

    def __init__(self) -> None:
        self.most: dict[int, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> WorkerMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_INTERVAL):
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
