"""One driver at a time changes an archive.

Two locks, since a driver is two processes. Python holds ``flock`` on one file: a
second driver is refused at once, before it starts Java. Java holds a lock on another:
after a kill -9 of Python it lives on for some seconds, in which Spark may still end a
batch and write to the checkpoint; the next driver waits for that end. The operating
system frees either lock when its process is gone, however it went, so no lock is ever
left behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.layout import ArchiveLayout

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["lock_archive", "lock_archive_in_java"]

#: How long the Java of a driver that was killed is waited for, in s. It takes 2.5 s.
PATIENCE = 30.0

_POLL_SECONDS = 0.1


@contextmanager
def lock_archive(layout: ArchiveLayout) -> Iterator[None]:
    """Hold the lock of this process; to be taken before Java is started.

    :raises PipelineError: another process holds it; says which.
    """
    with layout.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(
                f"{layout.folder} is being changed by {_holder(file)}: one driver at "
                "a time; stop that one, or wait for its end"
            ) from None
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        yield


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.load(file)
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        # It has the lock and did not write yet.
        return "another process"


@contextmanager
def lock_archive_in_java(
    layout: ArchiveLayout,
    session: SparkSession,
    *,
    patience: float = PATIENCE,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Hold the lock of this process's Java.

    :param patience: s.
    :param now: monotonic s.
    :raises PipelineError: the Java of an earlier driver does not end.
    """
    jvm: Any = session._jvm
    # Where Java keeps it in sight: what only Python knows of is collected, and with
    # it its lock, once Python is gone.
    kept = jvm.java.lang.System.getProperties()
    key = f"synapse_replication.archive.lock:{layout.jvm_lock}"
    file = jvm.java.io.RandomAccessFile(str(layout.jvm_lock), "rw")
    try:
        give_up = now() + patience
        while not _try_lock(file):
            if now() >= give_up:
                raise PipelineError(
                    f"the Java process of an earlier driver still holds "
                    f"{layout.jvm_lock} after {patience:.0f} s: look for it with "
                    "'fuser', and stop it"
                )
            sleep(_POLL_SECONDS)
        kept.put(key, file)
        try:
            yield
        finally:
            kept.remove(key)
    finally:
        file.close()


def _try_lock(file: Any) -> bool:
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

    try:
        return file.getChannel().tryLock() is not None
    except Py4JJavaError as error:
        name = error.java_exception.getClass().getSimpleName()
        if name != "OverlappingFileLockException":
            raise
        # Another session in this very process.
        return False
