"""Checksums of the lines of JSON that are written to files and read again."""

from __future__ import annotations

from typing import Final
from zlib import crc32

#: What precedes the checksum of a line, and the length from there to the line's end.
_KEY: Final = b',"crc":"'
_LENGTH: Final = len(_KEY) + 8 + len(b'"}\n')


def add_checksum(text: bytes) -> bytes:
    """Return a line that ends in a checksum.

    The line has the additional key ``crc``: the CRC-32 of the line without it, as eight
    hexadecimal digits.

    :param text: a JSON object that is not empty, without a line end.
    """
    return b'%b%b%08x"}\n' % (text[:-1], _KEY, crc32(text))


def strip_checksum(line: bytes) -> bytes:
    """Return the text of a line without its checksum; a line may have none.

    :param line: the line, with its line end.
    :raises ValueError: if the checksum is wrong.
    """
    begin = len(line) - _LENGTH
    if line[max(begin, 0) :].startswith(_KEY):
        text = line[:begin] + b"}"
        if line[begin + len(_KEY) :] != b'%08x"}\n' % crc32(text):
            raise ValueError("the checksum is wrong; the file is damaged here")
        return text
    return line
