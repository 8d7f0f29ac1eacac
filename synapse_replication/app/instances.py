"""The instances of a deployment, asked for their status one by one.

An instance may run this package, in a process of its own or in a homeserver's, or be
stock: a process of Synapse that knows nothing of this package, and answers that it has
no such path.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

import attrs
import msgspec
from twisted.internet.defer import Deferred

from synapse_replication.errors import HttpCatchUpError, ReplicationError
from synapse_replication.instrumentation.status.model import (
    ProcessStatus,
    decode_status,
)

#: Requests the status of an instance, by its name, as JSON.
FetchStatus: TypeAlias = Callable[[str], Awaitable[bytes]]


class InstanceState(enum.Enum):
    """The state of an instance, as its answer shows it."""

    OURS = "ours"  #: it runs this package, and has returned its status
    STOCK = "stock"  #: it runs, without this package
    FAILED = "failed"  #: it did not answer, or not as an instance does
    MISDIRECTED = "misdirected"  #: another instance answered at its address


@attrs.frozen
class InstanceReport:
    """The answer of an instance.

    :ivar detail: what is wrong; empty if nothing is.
    :ivar status: its status, if it runs this package.
    """

    name: str
    state: InstanceState
    detail: str = ""
    status: ProcessStatus | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the instance itself has answered."""
        return self.state in (InstanceState.OURS, InstanceState.STOCK)


async def ask_instances(
    fetch: FetchStatus, names: Iterable[str]
) -> list[InstanceReport]:
    """Ask all instances at the same time, and return their reports."""
    asking = [Deferred.fromCoroutine(_ask(fetch, name)) for name in names]
    return [await each for each in asking]


async def _ask(fetch: FetchStatus, name: str) -> InstanceReport:
    try:
        status = decode_status(await fetch(name))
    except HttpCatchUpError as error:
        if _is_stock(error):
            return InstanceReport(name, InstanceState.STOCK)
        return InstanceReport(name, InstanceState.FAILED, str(error))
    except ReplicationError as error:
        return InstanceReport(name, InstanceState.FAILED, str(error))
    if status.instance_name != name:
        detail = f"{status.instance_name} answered at its address; correct instance_map"
        return InstanceReport(name, InstanceState.MISDIRECTED, detail, status)
    return InstanceReport(name, InstanceState.OURS, "", status)


def _is_stock(error: HttpCatchUpError) -> bool:
    """Return whether an error is the answer of a stock instance to an unknown path."""
    if error.status != 404:
        return False
    try:
        answer = msgspec.json.decode(error.body)
    except msgspec.DecodeError:
        return False
    return isinstance(answer, dict) and answer.get("errcode") == "M_UNRECOGNIZED"
