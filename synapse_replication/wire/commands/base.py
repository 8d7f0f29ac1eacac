"""What all commands have in common: the class, and how their fields are read."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Final, NoReturn

import msgspec

from synapse_replication.errors import LocalProtocolError, UnparsableLineError
from synapse_replication.streams.rows import encode_json

__all__ = [
    "MAX_NAME_LENGTH",
    "Command",
    "check_name",
    "decode_fields",
    "encode_text",
    "parse_token",
]

#: The longest name of a stream, an instance, a server or a task, in bytes.
MAX_NAME_LENGTH: Final = 255
#: The longest id that a user may have chosen, or that is made of such ones, in bytes.
MAX_ID_LENGTH: Final = 4096

_INT64_DIGITS: Final = 19
_INT64_MAX: Final = 2**63 - 1
_INT64_MIN: Final = -(2**63)


def parse_token(text: str) -> int:
    """Read a token: ``-?[0-9]+`` in ASCII, within a signed 64-bit integer.

    :raises ValueError: if it is none. The message does not repeat the text.
    """
    digits = text[1:] if text[:1] == "-" else text
    # isdigit() alone takes the digits of other scripts. The length is checked
    # before int(), whose work grows with the square of it.
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError("a token is a decimal number")
    if (
        len(digits) > _INT64_DIGITS
        or not _INT64_MIN <= (token := int(text)) <= _INT64_MAX
    ):
        raise ValueError("a token fits 64 bits")
    return token


def check_name(name: str) -> str:
    """Return a name if it may be stored, shown and logged.

    :raises ValueError: if it is empty, long or not printable. The message does not
        repeat it.
    """
    if not name:
        raise ValueError("a field is empty")
    if len(name.encode("utf-8", "replace")) > MAX_NAME_LENGTH:
        raise ValueError(f"a name has more than {MAX_NAME_LENGTH} bytes")
    if not name.isprintable():
        raise ValueError("a name is not printable")
    return name


class Command(abc.ABC):
    """What one line says."""

    __slots__ = ()

    #: The first word of the line.
    NAME: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def from_line(cls, line: str) -> Command:
        """Read what follows the name and the space.

        :raises UnparsableLineError: if it is not of this command's form.
        """

    @abc.abstractmethod
    def to_line(self) -> str:
        """Write what follows the name and the space.

        :raises LocalProtocolError: if a field holds what a line cannot say.
        """

    def encode(self) -> bytes:
        """Write the whole line, without its end.

        :raises LocalProtocolError: if a field holds what a line cannot say, for
            instance a line's end.
        """
        return encode_text(self.NAME, f"{self.NAME} {self.to_line()}")

    @classmethod
    def redis_channel_name(cls, prefix: str) -> str:
        """Name the Redis channel that the command is published on.

        :param prefix: the homeserver's name.
        """
        return prefix

    def get_logcontext_id(self) -> str:
        """Name what handling the command is about, for a host's log context."""
        return self.NAME

    @classmethod
    def _refuse(cls, reason: object) -> NoReturn:
        raise UnparsableLineError(cls.NAME, str(reason)) from None

    @classmethod
    def _words(cls, line: str, count: int) -> list[str]:
        """Split into ``count`` words, of which the last takes what is left."""
        words = line.split(" ", count - 1)
        if len(words) != count:
            cls._refuse(f"it has {len(words)} fields, not {count}")
        if "" in words:
            cls._refuse("a field is empty")
        return words

    @classmethod
    def _word(cls, text: str) -> str:
        """Take what must be one word: an id or a server's name."""
        if not text or " " in text:
            cls._refuse("it is not one word")
        return text

    @classmethod
    def _name(cls, text: str) -> str:
        """Return a name of one word that others may be shown."""
        try:
            return check_name(cls._word(text))
        except ValueError as error:
            cls._refuse(error)

    @classmethod
    def _id(cls, text: str) -> str:
        """Return an id that users may have chosen: it is only bounded."""
        if len(text.encode("utf-8", "replace")) > MAX_ID_LENGTH:
            cls._refuse(f"an id has more than {MAX_ID_LENGTH} bytes")
        return text

    @classmethod
    def _integer(cls, text: str) -> int:
        try:
            return parse_token(text)
        except ValueError as error:
            cls._refuse(error)

    @classmethod
    def _json(cls, value: Any) -> str:
        try:
            return encode_json(value).decode()
        except ValueError as error:
            cls._refuse_to_send(error)

    @classmethod
    def _refuse_to_send(cls, reason: object) -> NoReturn:
        raise LocalProtocolError(f"{cls.NAME} cannot be sent: {reason}") from None


def decode_fields(
    command: type[Command], decoder: msgspec.json.Decoder[Any], text: str
) -> Any:
    """Decode the fields of a command.

    :raises UnparsableLineError: if they are not what the decoder expects.
    """
    # The fields may be secret: a decoder's message names places, never values.
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UnparsableLineError(command.NAME, str(error)) from None


def encode_text(name: str, text: str) -> bytes:
    """Encode what is to stand in one line.

    :param name: of the command, for the error.
    :raises LocalProtocolError: if it holds a line's end, or is not Unicode text.
    """
    if "\n" in text:
        raise LocalProtocolError(
            f"{name} cannot be sent: a field holds the end of a line"
        )
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise LocalProtocolError(
            f"{name} cannot be sent: a field is not Unicode text"
        ) from None
