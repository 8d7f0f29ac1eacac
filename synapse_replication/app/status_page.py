"""The status page: HTML that a phone can read, live by a small script, from one place.

Made on the server; the script fetches the page's body again each second. Nothing is
loaded from elsewhere, which the page's Content-Security-Policy enforces.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import attrs
from jinja2 import Environment, PackageLoader, StrictUndefined
from twisted.web.resource import Resource

from synapse_replication.instrumentation.status.model import (
    WORST_FIRST,
    Condition,
    ProcessStatus,
    Standing,
    WriterStatus,
    assess,
    describe_lag,
    describe_progress,
    encode_status,
    group_stalls,
)
from synapse_replication.text import printable

__all__ = [
    "ReadyResource",
    "StatusJsonResource",
    "StatusPageResource",
    "Verdict",
    "duration",
    "judge",
    "sparkline",
]

_TONES = {
    Condition.LIVE: "good",
    Condition.WRITTEN_HERE: "good",
    Condition.CATCHING_UP: "busy",
    Condition.DRAINING: "busy",
    Condition.WAITING: "busy",
    Condition.STALLED: "bad",
}


#: The tone and the text of a verdict.
_VERDICTS = {
    Standing.DUPLICATE_NAME: ("bad", "Two processes have one name"),
    Standing.STALLED: ("bad", "{count} of {streams} stalled"),
    Standing.CUT_OFF: ("bad", "No link is up"),
    Standing.CATCHING_UP: ("busy", "{count} of {streams} catching up"),
    Standing.DRAINING: ("busy", "Draining {count} of {streams}"),
    Standing.LIVE: ("good", "All rows arrive"),
}

#: So that a verdict is not told by its colour alone.
_SIGNS = {"good": "\u2714", "busy": "\u25cf", "bad": "\u2716"}
#: How long the page waits for what is new before it says that nobody answers, in ms.
PATIENCE_MS = 4000


@attrs.frozen
class Verdict:
    """What there is to say first.

    :ivar tone: ``good``, ``busy`` or ``bad``.
    """

    tone: str
    text: str

    @property
    def sign(self) -> str:
        """The tone, for those who see no colours."""
        return _SIGNS[self.tone]


def judge(status: ProcessStatus) -> Verdict:
    """Return in one line how a process's replication stands, the worst first."""
    found = assess(status)
    count, streams = len(found.concerned), _streams(found.followed)
    if found.standing is Standing.WAITING:
        text = f"Waiting for {count} of {streams}"
        # Others may be of processes that went for good.
        downs = [link for link in status.links if not link.up]
        if downs:
            newest = min(downs, key=lambda link: link.since)
            text += f": {newest.name} is down for {duration(newest.since)}"
        return Verdict("busy", text)
    if found.standing is Standing.NOT_READY:
        return Verdict("busy", f"Not ready: {status.not_ready[0]}")
    tone, text = _VERDICTS[found.standing]
    return Verdict(tone, text.format(count=count, streams=streams))


def _streams(followed: Sequence[WriterStatus]) -> str:
    """Count: a stream of two writers is two."""
    return f"{len(followed)} stream{'s' * (len(followed) != 1)}"


def duration(seconds: float) -> str:
    """Write s as people say it."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{seconds:.0f} s"


def sparkline(history: Sequence[int]) -> str:
    """Return the points of a line in a box of 100 by 20; the highest one touches 1."""
    top = max(*history, 1)
    step = 100 / (len(history) - 1)
    return " ".join(
        f"{index * step:.1f},{19 - 18 * lag / top:.1f}"
        for index, lag in enumerate(history)
    )


def _clock_time(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%H:%M:%S UTC")


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("synapse_replication.app"),
        autoescape=True,
        # What peers call themselves must not steer a terminal or reorder the page.
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
    )
    environment.filters["clock"] = _clock_time
    environment.filters["duration"] = duration
    environment.filters["sparkline"] = sparkline
    environment.filters["lag"] = describe_lag
    environment.filters["progress"] = describe_progress
    environment.filters["tone"] = lambda writer: _TONES[writer.condition]
    return environment


class _StatusResource(Resource):
    """Answers with something made of the status of now."""

    isLeaf = True  # noqa: N815

    def __init__(self, snapshot: Callable[[], ProcessStatus]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._snapshot = snapshot


class StatusJsonResource(_StatusResource):
    """Answers with the status as JSON."""

    def render_GET(self, request: Any) -> bytes:
        """Answer with the status as JSON."""
        request.setHeader(b"Content-Type", b"application/json")
        request.setHeader(b"Cache-Control", b"no-store")
        return encode_status(self._snapshot())


class ReadyResource(_StatusResource):
    """Answers 200 once all that is followed was caught up, else 503 and why not."""

    def render_GET(self, request: Any) -> bytes:
        """Answer 200 or 503, with the reasons a line each."""
        request.setHeader(b"Content-Type", b"text/plain; charset=utf-8")
        not_ready = self._snapshot().not_ready
        if not_ready:
            request.setResponseCode(503)
        return "\n".join(not_ready or ["ready"]).encode()


class StatusPageResource(_StatusResource):
    """Answers with the page, or with ``?part=body`` with what of it changes.

    :param wall_clock: gives s since the epoch.
    """

    def __init__(
        self,
        snapshot: Callable[[], ProcessStatus],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(snapshot)
        self._wall_clock = wall_clock
        environment = _environment()
        self._page = environment.get_template("status.html")
        self._body = environment.get_template("status_body.html")

    def render_GET(self, request: Any) -> bytes:
        """Answer with the page, or the part of it that changes."""
        nonce = secrets.token_urlsafe(12)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            (
                "Content-Security-Policy",
                f"default-src 'none'; style-src 'nonce-{nonce}'; img-src data:; "
                f"script-src 'nonce-{nonce}'; connect-src 'self'; base-uri 'none'; "
                "frame-ancestors 'none'",
            ),
        ):
            request.setHeader(name.encode(), value.encode())
        status = self._snapshot()
        template = self._body if request.args.get(b"part") == [b"body"] else self._page
        return template.render(
            status=status,
            now=self._wall_clock(),
            writers=sorted(
                status.writers, key=lambda writer: WORST_FIRST.index(writer.condition)
            ),
            members=sorted(status.members, key=lambda member: not member.is_gone),
            verdict=judge(status),
            stalled=group_stalls(status.writers),
            nonce=nonce,
            bad=_SIGNS["bad"],
            patience_ms=PATIENCE_MS,
        ).encode()
