"""The base class of commands, and functions that parse and check their fields."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Final, NoReturn

import msgspec

from synapse_replication.errors import LocalProtocolError, UnparsableLineError
from synapse_replication.streams.rows import encode_json

#: The longest name of a stream, an instance, a server or a task, in bytes.
MAX_NAME_LENGTH: Final = 255
#: The longest id that users may influence (user, device, lock key), in bytes.
MAX_ID_LENGTH: Final = 4096

_INT64_DIGITS: Final = 19
_INT64_MAX: Final = 2**63 - 1
_INT64_MIN: Final = -(2**63)


def parse_token(text: str) -> int:
    """Parse a token: ``-?[0-9]+`` in ASCII, in the range of a signed 64-bit integer.

    :raises ValueError: if the text is not a token. The message does not quote it.
    """
    digits = text[1:] if text[:1] == "-" else text
    # isdigit() alone accepts the digits of other scripts. The length is checked before
    # int() is called, because int() takes quadratic time.
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError("the token is not a decimal number")
    if (
        len(digits) > _INT64_DIGITS
        or not _INT64_MIN <= (token := int(text)) <= _INT64_MAX
    ):
        raise ValueError("the token does not fit in 64 bits")
    return token


def check_name(name: str) -> str:
    """Return the name if it is safe to store, display and log.

    :raises ValueError: if it is empty, too long or not printable. The message does
        not quote it.
    """
    if not name:
        raise ValueError("a field is empty")
    if len(name.encode("utf-8", "replace")) > MAX_NAME_LENGTH:
        raise ValueError(f"a name has more than {MAX_NAME_LENGTH} bytes")
    if not name.isprintable():
        raise ValueError("a name is not printable")
    return name


class Command(abc.ABC):
    """A command: the parsed form of one line."""

    __slots__ = ()

    #: The first word of the line.
    NAME: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def from_line(cls, line: str) -> Command:
        """Parse the part of a line after the command's name and the space.

        :raises UnparsableLineError: if the line is not valid for this command.
        """

    @abc.abstractmethod
    def to_line(self) -> str:
        """Return the part of the line after the command's name and the space.

        :raises LocalProtocolError: if a field cannot be encoded as JSON.
        """

    def encode(self) -> bytes:
        """Return the whole line, without its end.

        :raises LocalProtocolError: if a field cannot be represented in a line, for
            instance because it contains a newline.
        """
        return encode_text(self.NAME, f"{self.NAME} {self.to_line()}")

    @classmethod
    def redis_channel_name(cls, prefix: str) -> str:
        """Return the Redis channel on which the command is published.

        :param prefix: the homeserver's name.
        """
        return prefix

    def get_logcontext_id(self) -> str:
        """Return a label for the host's log context while the command is handled."""
        return self.NAME

    @classmethod
    def _raise_unparsable(cls, reason: object) -> NoReturn:
        raise UnparsableLineError(cls.NAME, str(reason)) from None

    @classmethod
    def _words(cls, line: str, count: int) -> list[str]:
        """Split a line into ``count`` words; the last one is the rest of the line."""
        words = line.split(" ", count - 1)
        if len(words) != count:
            cls._raise_unparsable(f"it has {len(words)} fields, not {count}")
        if "" in words:
            cls._raise_unparsable("a field is empty")
        return words

    @classmethod
    def _word(cls, text: str) -> str:
        """Return the text if it is one word, such as an id or a server name."""
        if not text or " " in text:
            cls._raise_unparsable("it is not one word")
        return text

    @classmethod
    def _name(cls, text: str) -> str:
        """Return the text if it is a valid name of one word."""
        try:
            return check_name(cls._word(text))
        except ValueError as error:
            cls._raise_unparsable(error)

    @classmethod
    def _id(cls, text: str) -> str:
        """Return an id that users may influence: only its length is checked."""
        if len(text.encode("utf-8", "replace")) > MAX_ID_LENGTH:
            cls._raise_unparsable(f"an id has more than {MAX_ID_LENGTH} bytes")
        return text

    @classmethod
    def _integer(cls, text: str) -> int:
        try:
            return parse_token(text)
        except ValueError as error:
            cls._raise_unparsable(error)

    @classmethod
    def _json(cls, value: Any) -> str:
        try:
            return encode_json(value).decode()
        except ValueError as error:
            cls._raise_unsendable(error)

    @classmethod
    def _raise_unsendable(cls, reason: object) -> NoReturn:
        raise LocalProtocolError(f"{cls.NAME} cannot be sent: {reason}") from None


def decode_fields(
    command: type[Command], decoder: msgspec.json.Decoder[Any], text: str
) -> Any:
    """Decode the fields of a command.

    :raises UnparsableLineError: if they do not match the decoder's type.
    """
    # The fields may be secret; the decoder's message contains paths but no values.
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UnparsableLineError(command.NAME, str(error)) from None


def encode_text(name: str, text: str) -> bytes:
    """Encode the text of one line.

    :param name: the command's name, for the error.
    :raises LocalProtocolError: if the text contains a newline or cannot be encoded
        as UTF-8.
    """
    if "\n" in text:
        raise LocalProtocolError(f"{name} cannot be sent: a field contains a newline")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise LocalProtocolError(
            f"{name} cannot be sent: a field cannot be encoded as UTF-8"
        ) from None
