"""Removal of a command's secrets from the host's errors.

For instance, an exception of a database driver may quote the values of a query, and
thereby the access token of USER_IP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from synapse_replication.errors import HostError
from synapse_replication.wire import commands


def without_secrets(error: Exception, command: commands.Command) -> Exception:
    """Return an error of the host whose text contains no secret of the command.

    :return: the error itself if neither its text nor that of an exception in its chain
        (``__cause__`` and ``__context__``) contains a secret. Otherwise a
        :class:`HostError` with the same traceback. Its text is the name of the error's
        class and the error's text, with ``***`` in place of each secret.
    """
    secrets = list(_secrets(command))
    if not secrets or not any(_contains(each, secrets) for each in _chain(error)):
        return error
    text = str(error)
    for secret in secrets:
        text = text.replace(secret, "***")
    # Return the new error instead of raising it: otherwise the original error would be
    # its __context__, and would be logged with it.
    return HostError(type(error).__name__, text).with_traceback(error.__traceback__)


def _secrets(command: commands.Command) -> Iterator[str]:
    if isinstance(command, commands.UserIpCommand):
        found: list[Any] = [command.access_token]
    elif isinstance(command, commands.InvalidateCacheCommand):
        # Some caches have access tokens as keys.
        found = list(command.keys or [])
    else:
        return
    yield from (value for value in found if isinstance(value, str) and value)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def _contains(error: BaseException, secrets: list[str]) -> bool:
    text = f"{error} {error!r}"
    return any(secret in text for secret in secrets)
