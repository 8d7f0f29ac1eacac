"""Everything that this package raises, in one tree.

::

    ReplicationError
    +-- ProtocolError                 something is wrong with a line or a connection
    |   +-- LocalProtocolError        our fault: we were asked to send nonsense
    |   |   +-- LineTooLongError
    |   +-- RemoteProtocolError       the peer's fault
    |       +-- UnparsableLineError
    |       +-- UnknownCommandError
    |       +-- ForbiddenCommandError
    |       +-- RowDecodeError
    |       +-- ExtensionMessageError
    |       +-- UnknownExtensionError
    +-- TokenError                    a text or a pair of numbers that is no token
    +-- StreamConfigurationError      streams and writers that do not fit together
    +-- ConfigError                   every mistake in the configuration, at once
    +-- CatchUpError                  rows could not be fetched; a retry may help
    |   +-- HttpCatchUpError
    +-- StorageError
    |   +-- SequenceBehindError
    |   +-- ImplausiblePositionError  a position that its stream has not reached
    +-- PipelineError                 a job on Spark cannot go on; says what to do
    |   +-- SparkMissingError         Java or PySpark is not installed
    +-- HostError                     the host failed with a command that has secrets
    +-- HooksNotFoundError            a function that subscribes cannot be imported
    +-- HooksOverflowError            events came faster than hooks could be told
    +-- StatusError                   a process does not say how it stands
    +-- SupervisorError               the service manager's environment makes no sense
    +-- WaitTimeoutError              a position was not reached in time
    +-- ServerStartError              a private server of the test kit did not start

The class says whose fault it is; what went wrong is in the attributes, not only
in the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

__all__ = [
    "CatchUpError",
    "ConfigError",
    "ConfigProblem",
    "ExtensionMessageError",
    "ForbiddenCommandError",
    "HooksNotFoundError",
    "HooksOverflowError",
    "HostError",
    "HttpCatchUpError",
    "ImplausiblePositionError",
    "LineTooLongError",
    "LocalProtocolError",
    "PipelineError",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplicationError",
    "RowDecodeError",
    "SequenceBehindError",
    "ServerStartError",
    "SparkMissingError",
    "StatusError",
    "StorageError",
    "StreamConfigurationError",
    "SupervisorError",
    "TokenError",
    "UnknownCommandError",
    "UnknownExtensionError",
    "UnparsableLineError",
    "WaitTimeoutError",
]

#: How many characters of somebody else's text an error message repeats.
EXCERPT_LENGTH = 120


def excerpt(text: str | bytes) -> str:
    """Shorten and escape untrusted text, so that it can stand in a log line."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if len(text) > EXCERPT_LENGTH:
        text = text[:EXCERPT_LENGTH] + "..."
    return ascii(text)[1:-1]


#: From here on a text may be a line with an access token: those that carry them.
_SECRETIVE: Final = re.compile(
    r"\b(USER_IP|INVALIDATE_CACHE|RDATA caches)\b.*", re.DOTALL
)
#: What may be shown of a line of which nothing is known: a word like a command's name.
_NAME: Final = re.compile(r"[A-Z][A-Z_]{0,39}")


def without_lines(text: str) -> str:
    """Cut the part of a peer's text that may repeat a line with a secret in it."""
    return _SECRETIVE.sub(r"\1 (the rest is not shown)", text)


def _shown_name(word: str) -> str:
    if _NAME.fullmatch(word):
        return word
    return f"of {len(word)} characters that is no name of one"


class ReplicationError(Exception):
    """The root of the tree."""


class ProtocolError(ReplicationError):
    """Something is wrong with a line or with a connection."""


class LocalProtocolError(ProtocolError):
    """This side was asked to do what the protocol does not allow."""


class LineTooLongError(LocalProtocolError):
    """A command was refused before it was sent: its line is too long.

    :ivar command_name: the command, for instance ``"RDATA"``.
    :ivar length: the length of the line in bytes, without its end.
    :ivar limit: the longest line that is allowed, in bytes.
    """

    def __init__(self, command_name: str, length: int, limit: int) -> None:
        super().__init__(
            f"{command_name} line of {length} bytes is longer than the {limit} "
            "bytes that a peer accepts; send less in one row"
        )
        self.command_name = command_name
        self.length = length
        self.limit = limit


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol does not allow."""


class UnparsableLineError(RemoteProtocolError):
    """A line is no command of the protocol's form.

    :ivar command_name: its first word.
    :ivar reason: what is wrong, without any of the line's arguments: they may be
        secret.
    """

    def __init__(self, command_name: str, reason: str) -> None:
        super().__init__(f"cannot parse {_shown_name(command_name)} line: {reason}")
        self.command_name = command_name
        self.reason = reason


class UnknownCommandError(RemoteProtocolError):
    """A line's first word is no command that we know."""

    def __init__(self, command_name: str) -> None:
        super().__init__(f"unknown command {_shown_name(command_name)}")
        self.command_name = command_name


class ForbiddenCommandError(RemoteProtocolError):
    """A command that this side may not receive."""

    def __init__(self, command_name: str) -> None:
        super().__init__(f"command {command_name} may not be sent to this side")
        self.command_name = command_name


class RowDecodeError(RemoteProtocolError):
    """A row is not what its stream says that rows are.

    :ivar stream_name: the stream.
    :ivar index: which of the rows that were decoded together, from 0.
    :ivar reason: what is wrong with it.
    """

    def __init__(self, stream_name: str, index: int, reason: str) -> None:
        super().__init__(f"cannot decode a row of {excerpt(stream_name)}: {reason}")
        self.stream_name = stream_name
        self.index = index
        self.reason = reason


class ExtensionMessageError(RemoteProtocolError):
    """What came on the extension's channel is no message of it.

    :ivar reason: what is wrong, without any of its text.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"cannot read a message of the extension: {reason}")
        self.reason = reason


class UnknownExtensionError(RemoteProtocolError):
    """A message of the extension is of a version or type that we do not know.

    :ivar what: the version or type.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"unknown {excerpt(what)} of a message of the extension")
        self.what = what


class TokenError(ReplicationError):
    """A text or a set of numbers is no token.

    :ivar text: what was given.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(f"{excerpt(text)} is no token: {reason}")
        self.text = text
        self.reason = reason


class StreamConfigurationError(ReplicationError):
    """Streams, writers and sources do not fit together; found at the start."""


class ConfigProblem:
    """One mistake in the configuration.

    :ivar file: the file that it stands in, or where else it came from.
    :ivar key: the dotted path of the key, for instance ``redis.port``.
    :ivar problem: what is wrong.
    :ivar hint: what to write instead.
    :ivar line: the line in the file, from 1, if the key stands there.
    """

    __slots__ = ("file", "hint", "key", "line", "problem")

    def __init__(
        self, file: str, key: str, problem: str, hint: str, line: int | None = None
    ) -> None:
        self.file = file
        self.key = key
        self.problem = problem
        self.hint = hint
        self.line = line

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.key}: {self.problem}; {self.hint}"

    def __repr__(self) -> str:
        return f"<ConfigProblem {self}>"


class ConfigError(ReplicationError):
    """The configuration has mistakes.

    :ivar problems: all of them.
    """

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class CatchUpError(ReplicationError):
    """Rows could not be fetched from their source. A retry may help."""


class HttpCatchUpError(CatchUpError):
    """The writer's process did not answer a request for rows.

    :ivar method: the HTTP method.
    :ivar url: the URL asked, without secrets.
    :ivar status: the HTTP status, or ``None`` if there was no answer.
    :ivar body: the beginning of the answer.
    """

    def __init__(
        self, method: str, url: str, status: int | None, body: str, hint: str = ""
    ) -> None:
        what = f"answered {status}" if status is not None else "did not answer"
        super().__init__(
            f"{method} {url} {what}: {excerpt(body)}" + (f"; {hint}" if hint else "")
        )
        self.method = method
        self.url = url
        self.status = status
        self.body = body


class HostError(ReplicationError):
    """The host failed to handle a command; its own words, without what is secret.

    :ivar kind: what the host raised, by its name.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class HooksNotFoundError(ReplicationError):
    """A function that is to subscribe to hooks cannot be imported."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(
            f"hooks: {name} cannot be imported: {error}; write the dotted name of a "
            "function (host, config), and install its module where this process runs"
        )


class HooksOverflowError(ReplicationError):
    """Events came faster than subscribers could be told of them.

    :ivar count: how many were left out.
    """

    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count} events were left out, since too many waited; have the callbacks "
            "do less in the reactor's thread"
        )
        self.count = count


class PipelineError(ReplicationError):
    """A job of the pipeline cannot go on; the text says why and what to do."""


class SparkMissingError(PipelineError):
    """Java or PySpark is not installed, or not of a version that works."""


class StatusError(ReplicationError):
    """Another process did not say how its replication stands."""


class StorageError(ReplicationError):
    """The database holds, or answers, what it should not."""


class SequenceBehindError(StorageError):
    """A sequence would give out ids that count as used.

    :param suspect: what to look at if ``value`` is too far beyond the sequence to be
        believed; empty if it is near, and then the sequence may be moved to it.
    :ivar sequence_name: the sequence.
    :ivar source: where the greater number comes from, for people.
    :ivar sequence_value: the last value of the sequence.
    :ivar value: the greater number (its distance from zero).
    :ivar hint: the SQL statement that repairs it; empty if the sequence is not to be
        moved.
    """

    def __init__(
        self,
        sequence_name: str,
        source: str,
        sequence_value: int,
        value: int,
        *,
        suspect: str = "",
    ) -> None:
        self.hint = (
            "" if suspect else f"SELECT setval('{sequence_name}', {value}, true);"
        )
        advice = (
            f"that is {value - sequence_value} further, too far to be an id of this "
            f"stream, so leave the sequence as it is: {suspect}"
            if suspect
            else f"with all writers stopped, run: {self.hint}"
        )
        super().__init__(
            f"sequence {sequence_name} stands at {sequence_value} but {source} holds "
            f"{value}; {advice}"
        )
        self.sequence_name = sequence_name
        self.source = source
        self.sequence_value = sequence_value
        self.value = value


class ImplausiblePositionError(StorageError):
    """A writer was announced at a position that its stream has not reached.

    :ivar stream_name: the stream.
    :ivar instance_name: in whose name it was announced.
    :ivar position: the position.
    :ivar last: the last one that can be.
    """

    def __init__(
        self, stream_name: str, instance_name: str, position: int, last: int
    ) -> None:
        super().__init__(
            f"{excerpt(instance_name)} was announced at {position} of "
            f"{excerpt(stream_name)}, which stands at {last}: that is ignored. Does an "
            "instance of another deployment publish here?"
        )
        self.stream_name = stream_name
        self.instance_name = instance_name
        self.position = position
        self.last = last


class WaitTimeoutError(ReplicationError):
    """A position was not reached within the time that the caller gave.

    :ivar stream_name: the stream.
    :ivar instance_name: the writer.
    :ivar position: what was waited for.
    :ivar current: where the writer stood in the end.
    """

    def __init__(
        self, stream_name: str, instance_name: str, position: int, current: int
    ) -> None:
        super().__init__(
            f"{stream_name} of {instance_name} is at {current}, "
            f"and did not reach {position} in time"
        )
        self.stream_name = stream_name
        self.instance_name = instance_name
        self.position = position
        self.current = current


class SupervisorError(ReplicationError):
    """What the service manager told the process makes no sense."""


class ServerStartError(ReplicationError):
    """A private server of the test kit was not found or did not start."""
