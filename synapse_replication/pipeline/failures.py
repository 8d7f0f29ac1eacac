"""Shortens errors of Spark, object stores and Delta tables to one line.

This package's errors name the problem and its solution. If a Python worker raises such
an error, the driver receives the error's message within an exception of Spark, among a
hundred lines of stack traces. :func:`spark_error_text` extracts that message. If a file
was removed while it was being read, it returns an explanation. For any other failure,
it returns the last exception of a Python traceback or, without a traceback, the first
line of the message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from synapse_replication.data_files import read_table
from synapse_replication.errors import PipelineError

# "synapse_replication.errors.PipelineError: text", up to the end of the line, without
# the SQLSTATE that Spark appends.
_OURS = re.compile(
    r"synapse_replication\.errors\.\w+Error: (.+?)(?:\s*SQLSTATE: \w+)*\s*$",
    re.MULTILINE,
)

#: Messages about a file that was removed after it was listed.
_FILE_GONE = re.compile(
    r"FAILED_READ_FILE\.FILE_NOT_EXIST|FileNotFound(?:Exception|Error)"
)

#: The last line of a Python traceback.
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", re.MULTILINE)

#: A line that Py4J puts before a Java exception.
_OF_PY4J = re.compile(r"An error occurred while calling \S+\.?$")

#: The number of characters after which a message that is not from this package is cut.
_LONGEST_MESSAGE = 400

#: The maximum length of a cause. The end of a longer one is shown.
_LONGEST: Final = 300

#: The answer of an S3 server.
_ANSWER: Final = re.compile(r"<Code>(\w+)</Code>\s*<Message>([^<]*)</Message>")

#: The number of the last errors of a chain that are shown.
_SHOWN: Final = 3

#: Regular expressions for the texts of errors, and what to do about them.
_HINTS: Final = read_table(Path(__file__).with_name("hints.csv"))


def spark_error_text(error: BaseException) -> str:
    """Return the message of a Spark exception, without stack traces."""
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        # Use the last one: in a Python traceback, it is the exception that was raised
        # last; after Java's "Caused by", it is the root cause.
        return str(ours[-1])
    if _FILE_GONE.search(text):
        return (
            "a file was removed while it was being read. If the archive was compacted "
            "or purged at the same time, no data is lost; run the job again"
        )
    if "Traceback (most recent call last)" in text and (
        raised := _RAISED.findall(text)
    ):
        return _cut(raised[-1])
    lines = (line.strip(": \t") for line in text.splitlines())
    first = next((line for line in lines if line and not _OF_PY4J.match(line)), "")
    return _cut(first or type(error).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "..."


@contextmanager
def spark_errors_shortened() -> Iterator[None]:
    """Shorten the exceptions that Spark raises within the context.

    :raises PipelineError: if Spark raises an exception.
    """
    try:
        yield
    except Exception as error:
        # Compare names, because the classes cannot be imported without Spark.
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        raise PipelineError(spark_error_text(error)) from error


def storage_error_text(error: Exception | str) -> str:
    """Return the cause of an error, in one line and without colours, with a hint.

    Errors of delta-rs are chains, whose last elements are the cause.
    """
    text = click.unstyle(str(error))
    if answer := _ANSWER.search(text):
        cause = f"{answer[1]}: {answer[2]}"
    else:
        chain = [" ".join(part.split()) for part in text.split("\u21b3")]
        cause = ": ".join(chain[-_SHOWN:])
    cause = "".join(each if each.isprintable() else "?" for each in cause)
    if len(cause) > _LONGEST:
        cause = "..." + cause[-_LONGEST:]
    hints = (row["Hint"] for row in _HINTS if re.search(row["Error"], text))
    hint = next(hints, None)
    return cause if hint is None else f"{cause}; {hint}"
