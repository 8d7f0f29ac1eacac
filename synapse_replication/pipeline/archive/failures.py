"""Shortens errors of object stores and of Delta tables to their cause and a hint."""

from __future__ import annotations

import re
from typing import Final

import click

#: The maximum length of a cause. The end of a longer one is shown.
_LONGEST: Final = 300

#: The answer of an S3 server.
_ANSWER: Final = re.compile(r"<Code>(\w+)</Code>\s*<Message>([^<]*)</Message>")

#: The number of the last errors of a chain that are shown.
_SHOWN: Final = 3

#: Texts of errors, and what to do about them.
_HINTS: Final = (
    ("NoSuchBucket|NO_SUCH_BUCKET", "create the bucket, or correct --archive"),
    (
        "InvalidAccessKeyId|SignatureDoesNotMatch|INVALID_ACCESS_KEY_ID|"
        "SIGNATURE_DOES_NOT_MATCH|ExpiredToken",
        "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    ("AccessDenied|ACCESS_DENIED", "check the rights of these credentials"),
    (
        r"169\.254\.169\.254|ACCESS_DENIED.*anonymous|CredentialsNotLoaded",
        "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    (
        "PermanentRedirect|AuthorizationHeaderMalformed|[Mm]issing region",
        "set AWS_REGION to the region of the bucket",
    ),
    (
        "NETWORK_CONNECTION|error sending request|dns error",
        "check AWS_ENDPOINT_URL, or Amazon's default, and the network",
    ),
    ("[Pp]ermission denied", "check the rights of this user"),
    ("[Rr]ead-only file system|[Cc]annot create", "choose another location"),
    ("[Nn]o space left|[Dd]isk quota", "free some space, and run the job again"),
)


def reason_of(error: Exception | str) -> str:
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
    hint = next((hint for found, hint in _HINTS if re.search(found, text)), None)
    return cause if hint is None else f"{cause}; {hint}"
