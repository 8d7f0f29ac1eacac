"""What went wrong, in one line: Spark wraps a sentence of ours in a hundred.

Our own errors say what and what to do; from the driver's processes they come back as
text within Spark's exceptions. Of any other failure the first line is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from synapse_replication.errors import PipelineError

__all__ = ["short_failures", "shorten"]

# "synapse_replication.errors.PipelineError: text", to the end of its line; Spark
# puts its own state behind it.
_OURS = re.compile(
    r"synapse_replication\.errors\.\w+Error: (.+?)(?:\s*SQLSTATE: \w+)*\s*$",
    re.MULTILINE,
)

#: What Spark says when a file was there when it looked, and is not when it reads.
_FILE_GONE = re.compile(r"FAILED_READ_FILE\.FILE_NOT_EXIST|FileNotFoundException")

#: What stands before the failure where it came from Java as it is.
_OF_PY4J = re.compile(r"An error occurred while calling \S+\.?$")

#: Characters of a failure that is not ours.
_LONGEST = 400


def shorten(error: BaseException) -> str:
    """Return what an exception of Spark is about, without its traces."""
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        # The last one was raised last: the cause of the others.
        return str(ours[-1])
    if _FILE_GONE.search(text):
        return (
            "a file was removed while it was read: an archive that is compacted or "
            "purged meanwhile does so. Nothing is lost; run this again"
        )
    lines = (line.strip(": \t") for line in text.splitlines())
    first = next((line for line in lines if line and not _OF_PY4J.match(line)), "")
    first = first or type(error).__name__
    return first if len(first) <= _LONGEST else first[:_LONGEST] + "..."


@contextmanager
def short_failures() -> Iterator[None]:
    """Turn what Spark raises within the context into one line.

    :raises PipelineError: if in place of any exception of Spark.
    """
    try:
        yield
    except Exception as error:
        # Looked at by name: where Spark is missing, its classes are, too.
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        raise PipelineError(shorten(error)) from error
