"""The hierarchy of the exceptions that this package raises.

::

    ReplicationError
    +-- ProtocolError                 something is wrong with a line or a connection
    |   +-- LocalProtocolError        this side was asked to violate the protocol
    |   |   +-- LineTooLongError
    |   +-- RemoteProtocolError       the peer violated the protocol
    |       +-- UnparsableLineError
    |       +-- UnknownCommandError
    |       +-- ForbiddenCommandError
    |       +-- RowDecodeError
    |       +-- ExtensionMessageError
    |       +-- UnknownExtensionError
    +-- TokenError                    a text is not a token
    +-- StreamConfigurationError      a stream is declared or used wrongly
    +-- StreamClosedError             the process stops; nothing was written
    +-- ConfigError                   the configuration is invalid; lists all problems
    +-- CatchUpError                  rows could not be fetched; a retry may help
    |   +-- DatabaseBehindError       the database is a standby that lacks them
    |   +-- RowsLostError
    |   +-- HttpCatchUpError
    +-- StorageError
    |   +-- CommitUnknownError        the answer to a COMMIT was lost
    |   +-- DatabaseClosedError       a transaction was requested after close()
    |   +-- NameLostError             another process writes under this one's name
    |   +-- SequenceBehindError
    |   +-- TransactionRolledBackError  a failed transaction was to be committed
    |   +-- ImplausiblePositionError  a position that its stream has not reached
    +-- PipelineError                 a pipeline job cannot continue; says what to do
    |   +-- SparkMissingError         Java or a module for Spark cannot be used
    +-- ResponseTooLargeError         a response exceeds a bound
    +-- HostError                     the host failed on a command that may have secrets
    +-- HooksNotFoundError            a function for hooks cannot be imported
    +-- HooksOverflowError            events arrived faster than hooks could run
    +-- StatusError                   a process did not return a valid status
    +-- SupervisorError               the service manager's environment is invalid
    +-- WaitTimeoutError              a position was not reached in time
    +-- ServerStartError              a server or process did not start, or ended

The class of a protocol error shows which side is at fault. Attributes contain the
details, so that callers need not parse the message. A few modules define further
subclasses of :class:`ReplicationError` for their own callers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

import attrs

#: The most characters of untrusted text that an error message repeats.
EXCERPT_LENGTH = 120


def excerpt(text: str | bytes) -> str:
    """Shorten and escape untrusted text, so that it is safe in a log line."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if len(text) > EXCERPT_LENGTH:
        text = text[:EXCERPT_LENGTH] + "..."
    return ascii(text)[1:-1]


#: The only part of an unknown line that may be shown: a word that looks like the name
#: of a command.
_NAME: Final = re.compile(r"[A-Z][A-Z_]{0,39}")


def _shown_name(word: str) -> str:
    if _NAME.fullmatch(word):
        return word
    return f"(a word of {len(word)} characters, not shown)"


class ReplicationError(Exception):
    """Base class of most exceptions of this package."""


class ProtocolError(ReplicationError):
    """A line or a connection violates the protocol."""


class LocalProtocolError(ProtocolError):
    """This side was asked to do what the protocol does not allow."""


class LineTooLongError(LocalProtocolError):
    """A command was rejected before it was sent, because its line is too long.

    :ivar command_name: the command, for instance ``"RDATA"``.
    :ivar length: the length of the line in bytes, without the line end.
    :ivar limit: the longest line that is allowed, in bytes.
    """

    def __init__(self, command_name: str, length: int, limit: int) -> None:
        super().__init__(
            f"{command_name} line of {length} bytes is longer than the {limit} "
            "bytes that a peer accepts; send smaller rows"
        )
        self.command_name = command_name
        self.length = length
        self.limit = limit


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow."""


class UnparsableLineError(RemoteProtocolError):
    """A line does not have the form of a command.

    :ivar command_name: the line's first word.
    :ivar reason: what is wrong. It repeats none of the line's arguments, which may
        be secret.
    """

    def __init__(self, command_name: str, reason: str) -> None:
        super().__init__(f"cannot parse {_shown_name(command_name)} line: {reason}")
        self.command_name = command_name
        self.reason = reason


class UnknownCommandError(RemoteProtocolError):
    """A line's first word is not a known command."""

    def __init__(self, command_name: str) -> None:
        super().__init__(f"unknown command {_shown_name(command_name)}")
        self.command_name = command_name


class ForbiddenCommandError(RemoteProtocolError):
    """A peer sent a command that this side must not receive."""

    def __init__(self, command_name: str) -> None:
        super().__init__(f"command {command_name} may not be sent to this side")


class RowDecodeError(RemoteProtocolError):
    """A row does not match the row format of its stream.

    :ivar stream_name: the stream.
    :ivar index: the row's index, from 0, among the rows that were decoded together.
    :ivar reason: what is wrong with the row.
    """

    def __init__(self, stream_name: str, index: int, reason: str) -> None:
        super().__init__(f"cannot decode a row of {excerpt(stream_name)}: {reason}")
        self.stream_name = stream_name
        self.index = index
        self.reason = reason


class ExtensionMessageError(RemoteProtocolError):
    """A message of the extension is malformed.

    :param reason: what is wrong, without any of the message's text.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"cannot read a message of the extension: {reason}")


class UnknownExtensionError(RemoteProtocolError):
    """A message of the extension has an unknown version or type.

    :param what: the version or type, for instance ``"type 'x'"``.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"unknown {excerpt(what)} in a message of the extension")


class TokenError(ReplicationError):
    """A text is not a token.

    :ivar text: the rejected text.
    :ivar reason: what is wrong with it.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(f"{excerpt(text)} is not a token: {reason}")
        self.text = text
        self.reason = reason


class StreamConfigurationError(ReplicationError):
    """A stream, a row sink or an environment variable is configured or used wrongly."""


class StreamClosedError(ReplicationError):
    """A row was to be written while the process stops; nothing was written.

    :ivar stream_name: the stream.
    """

    def __init__(self, stream_name: str) -> None:
        super().__init__(
            f"a row of {stream_name} was refused, because this process stops: nothing "
            "was written; write it again after the start"
        )
        self.stream_name = stream_name


@attrs.frozen
class ConfigProblem:
    """One problem in the configuration.

    :ivar file: the file or folder with the problem, or all files if that is unknown.
    :ivar key: the dotted path of the key, or a text such as ``(the file)``.
    :ivar problem: what is wrong.
    :ivar hint: what to do about the problem.
    :ivar line: the line in the file, from 1; ``None`` if the file does not set the
        key.
    """

    file: str
    key: str
    problem: str
    hint: str
    line: int | None = None

    @property
    def where(self) -> str:
        """The file, with the line if it is known."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.problem}; {self.hint}"

    def __repr__(self) -> str:
        return f"<ConfigProblem {self}>"


class ConfigError(ReplicationError):
    """The configuration is invalid.

    :ivar problems: every problem that was found.
    """

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class CatchUpError(ReplicationError):
    """Rows could not be fetched from their source. A retry may help."""


class DatabaseBehindError(CatchUpError):
    """The database is a standby that has not replayed the requested rows yet.

    A retry succeeds when it has.
    """


class RowsLostError(CatchUpError):
    """Rows that were requested do not exist any more. A retry cannot help.

    :ivar lost_upto: the greatest token of the rows that are lost. Later rows still
        exist.
    """

    def __init__(self, text: str, lost_upto: int) -> None:
        super().__init__(text)
        self.lost_upto = lost_upto


def _error_text(body: str) -> str:
    """Return the text of an error in Matrix's JSON, or else the whole body."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return body
    text = answer.get("error") if isinstance(answer, dict) else None
    return text if isinstance(text, str) and text else body


class HttpCatchUpError(CatchUpError):
    """A request for rows or a status was not sent, or had no valid response.

    :ivar method: the HTTP method.
    :ivar url: the requested URL, without secrets.
    :ivar status: the HTTP status, or ``None`` if there was no response.
    :ivar body: the body of a response whose status is not 200; otherwise, the reason
        for the failure.
    :ivar was_sent: whether a request was attempted: false if the address is not
        configured, true even if the connection failed.
    """

    def __init__(
        self,
        method: str,
        url: str,
        status: int | None,
        body: str,
        hint: str = "",
        *,
        was_sent: bool = True,
    ) -> None:
        if status is not None:
            what = f"answered {status}"
        else:
            what = "did not answer" if was_sent else "was not sent"
        super().__init__(
            f"{method} {url} {what}: {excerpt(_error_text(body))}"
            + (f"; {hint}" if hint else "")
        )
        self.method = method
        self.url = url
        self.status = status
        self.body = body
        self.was_sent = was_sent


class ResponseTooLargeError(ReplicationError):
    """A response over HTTP exceeds a bound of its head or of its body."""


class HostError(ReplicationError):
    """The host failed to handle a command that may contain secrets.

    The message is that of the host, without secrets.

    :param kind: the name of the exception class that the host raised.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")


class HooksNotFoundError(ReplicationError):
    """A configured function that would subscribe to hooks cannot be imported."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(
            f"hooks: {name} cannot be imported: {error}; write the dotted name of a "
            "function that takes (host, config), and install its module where this "
            "process runs"
        )


class HooksOverflowError(ReplicationError):
    """Events arrived faster than they could be delivered to subscribers.

    :ivar count: the number of events that were discarded.
    """

    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count} events were discarded because too many were waiting; make the "
            "callbacks do less in the reactor's thread"
        )
        self.count = count


class PipelineError(ReplicationError):
    """A job of the pipeline cannot continue; the message says why and what to do."""


class SparkMissingError(PipelineError):
    """Java cannot be used, or a module of the extra ``spark`` is missing."""


class StatusError(ReplicationError):
    """Another process did not return a valid replication status."""


class StorageError(ReplicationError):
    """Stored data or a position is invalid, or the database is closed."""


class DatabaseClosedError(StorageError):
    """A transaction was requested after ``close()``; it has not been begun.

    :ivar description: the transaction, as it was passed to ``transact``.
    """

    def __init__(self, description: str) -> None:
        super().__init__(f"{description}: the database was closed by close()")
        self.description = description


class TransactionRolledBackError(StorageError):
    """A function returned normally, but its transaction did not survive.

    A statement failed and the function caught the exception, or the function ended the
    transaction itself. Nothing that belongs to the transaction is announced.

    :ivar description: the transaction, as it was passed to ``transact``.
    """

    def __init__(self, description: str, reason: str) -> None:
        super().__init__(
            f"transaction {description} was rolled back, nothing was written: {reason}"
        )
        self.description = description


class CommitUnknownError(StorageError):
    """It is not known yet whether a transaction was committed.

    Its connection was lost after COMMIT had been sent. The database is asked until the
    transaction has ended; its ids are not finished before. If it was committed, its
    rows are announced and its ``call_after`` callbacks run.

    :ivar description: the transaction, as it was passed to ``transact``.
    """

    def __init__(self, description: str, reason: str) -> None:
        super().__init__(
            f"whether transaction {description} was committed is not known: {reason}; "
            "do not repeat it before you have looked for its effects"
        )
        self.description = description


class NameLostError(StorageError):
    """Another process has acquired the name of this one, which must write no more.

    The transaction that it refers to was rolled back.

    :ivar instance_name: the name.
    :ivar holder: describes the process that acquired it last.
    """

    def __init__(self, instance_name: str, holder: str) -> None:
        super().__init__(
            f"another process writes as {instance_name}: {holder} has acquired the "
            "name since this process started; nothing more can be written here"
        )
        self.instance_name = instance_name
        self.holder = holder


class SequenceBehindError(StorageError):
    """A sequence is behind ids that are in use, and would allocate them again.

    :param suspect: what to examine if ``value`` is implausibly far beyond the
        sequence; empty if ``value`` is plausible and the sequence may be advanced to
        it.
    :ivar sequence_name: the sequence.
    :ivar source: a description of where the greater value was found.
    :ivar sequence_value: the last value of the sequence.
    :ivar value: the greater value (its distance from zero).
    :ivar hint: the SQL statement that advances the sequence; empty if the sequence must
        not be advanced.
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
            f"the difference of {value - sequence_value} is too large for "
            f"{value} to be an id of this stream, so leave the sequence as it is: "
            f"{suspect}"
            if suspect
            else f"with all writers stopped, run: {self.hint}"
        )
        super().__init__(
            f"sequence {sequence_name} is at {sequence_value}, but {source} has "
            f"{value}; {advice}"
        )
        self.sequence_name = sequence_name
        self.source = source
        self.sequence_value = sequence_value
        self.value = value


class ImplausiblePositionError(StorageError):
    """A writer was announced at a position that its stream has not reached.

    :ivar stream_name: the stream.
    :ivar instance_name: the writer that the announcement names.
    :ivar position: the announced position.
    :ivar last: the greatest position that is possible.
    """

    def __init__(
        self, stream_name: str, instance_name: str, position: int, last: int
    ) -> None:
        super().__init__(
            f"{excerpt(instance_name)} was announced at {position} of "
            f"{excerpt(stream_name)}, which is at {last}; the announcement is ignored. "
            "Does an instance of another deployment publish here?"
        )
        self.stream_name = stream_name
        self.instance_name = instance_name
        self.position = position
        self.last = last


class WaitTimeoutError(ReplicationError):
    """A position was not reached within the caller's timeout.

    :ivar stream_name: the stream.
    :ivar instance_name: the writer.
    :ivar position: the awaited position.
    :ivar current: the position at the timeout.
    """

    def __init__(
        self, stream_name: str, instance_name: str, position: int, current: int
    ) -> None:
        super().__init__(
            f"{stream_name} of {instance_name} is at {current} "
            f"and did not reach {position} in time"
        )
        self.stream_name = stream_name
        self.instance_name = instance_name
        self.position = position
        self.current = current


class SupervisorError(ReplicationError):
    """The service manager set an invalid environment variable."""


class ServerStartError(ReplicationError):
    """A server or process of the test kit or demonstration did not start, or ended.

    It is also raised if the server's program was not found.
    """
