"""The status page: self-contained HTML for screens of any size, with live updates.

The server renders the page; a small script in the page fetches the body again every
second.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import attrs

from synapse_replication.instrumentation.status import model
from synapse_replication.instrumentation.status.assessment import Standing, assess
from synapse_replication.text import counted, printable

if TYPE_CHECKING:
    from jinja2 import Environment

_TONES = {
    model.Condition.LIVE: "good",
    model.Condition.WRITTEN_HERE: "good",
    model.Condition.CATCHING_UP: "busy",
    model.Condition.DRAINING: "busy",
    model.Condition.WAITING: "busy",
    model.Condition.STALLED: "bad",
}


#: The tone and the text of the verdict for each standing, unless :func:`judge` composes
#: another text.
_VERDICTS = {
    Standing.DUPLICATE_NAME: ("bad", "Two processes have one name"),
    Standing.ROWS_UNANNOUNCED: ("bad", "Committed rows were not announced"),
    Standing.STALLED: ("bad", "{count} of {streams} stalled"),
    Standing.CUT_OFF: ("bad", "No link is up"),
    Standing.STUCK_ID: ("bad", "An id is stuck"),
    Standing.SINK_DAMAGED: ("bad", "Stored rows are damaged"),
    Standing.CATCHING_UP: ("busy", "{count} of {streams} catching up"),
    Standing.DRAINING: ("busy", "Draining {count} of {streams}"),
    Standing.LIVE: ("good", "All rows arrive"),
}

#: Symbols, so that a verdict does not depend on its colour alone.
_SIGNS = {"good": "\u2714", "busy": "\u25cf", "bad": "\u2716"}
#: The number of writers and of peers, worst first, that have a line of their own.
MOST_SHOWN = 80
#: How long the page waits for an update before it reports that the process does not
#: answer, in ms.
PATIENCE_MS = 4000


@attrs.frozen
class PageVerdict:
    """The headline of a status.

    :ivar tone: ``good``, ``busy`` or ``bad``.
    :ivar text: the headline.
    """

    tone: str
    text: str

    @property
    def sign(self) -> str:
        """The tone as a symbol."""
        return _SIGNS[self.tone]


def judge(status: model.ProcessStatus) -> PageVerdict:
    """Return the worst state of a process's replication, as a headline."""
    found = assess(status)
    count, streams = len(found.concerned), counted(len(found.followed), "stream")
    if found.standing is Standing.WAITING:
        text = f"Waiting for {count} of {streams}"
        # Name the link that went down last: others may lead to removed processes.
        downs = [link for link in status.links if not link.up]
        if downs:
            newest = min(downs, key=lambda link: link.since)
            text += f": {newest.name} has been down for {duration(newest.since)}"
        return PageVerdict("busy", text)
    if found.standing is Standing.NOT_READY:
        return PageVerdict("busy", f"Not ready: {status.not_ready[0]}")
    if found.standing is Standing.INSTANCE_PROBLEM:
        count, total = len(status.troubled), len(status.instances)
        text = f"{count} of {counted(total, 'instance')} with a problem"
        return PageVerdict("bad", text)
    if found.standing is Standing.LIVE and status.instances:
        # A monitor does not know what the instances receive.
        return PageVerdict("good", "No problem found")
    tone, text = _VERDICTS[found.standing]
    return PageVerdict(tone, text.format(count=count, streams=streams))


def duration(seconds: float) -> str:
    """Return a duration in s as a short text, for instance ``3 min``."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{seconds:.0f} s"


def sparkline(history: Sequence[int]) -> str:
    """Return the points of an SVG polyline in a box of 100 by 20.

    :param history: at least two values.
    """
    top = max(*history, 1)
    step = 100 / (len(history) - 1)
    return " ".join(
        f"{index * step:.1f},{19 - 18 * lag / top:.1f}"
        for index, lag in enumerate(history)
    )


def _clock_time(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%H:%M:%S UTC")


@functools.cache
def _environment() -> Environment:
    # The engine takes 2 MB, and most processes never render a page.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("synapse_replication.app"),
        autoescape=True,
        # Control characters in peers' names must not reorder the page's text.
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
    )
    environment.filters["clock"] = _clock_time
    environment.filters["duration"] = duration
    environment.filters["sparkline"] = sparkline
    environment.filters["lag"] = model.describe_lag
    environment.filters["progress"] = model.describe_progress
    environment.filters["stuck"] = model.describe_stuck_id
    environment.filters["tone"] = lambda writer: _TONES[writer.condition]
    return environment


def render_page(status: model.ProcessStatus, nonce: str, *, is_body: bool) -> str:
    """Return the page.

    :param nonce: the nonce of the page's style and script.
    :param is_body: whether to return only the part that changes.
    """
    template = _environment().get_template(
        "status_body.html" if is_body else "status.html"
    )
    writers = sorted(
        status.writers,
        key=lambda each: (model.WORST_FIRST.index(each.condition), -each.lag),
    )
    peers = sorted(status.peers, key=lambda peer: not peer.is_gone)
    return template.render(
        status=status,
        now=time.time(),
        writers=writers[:MOST_SHOWN],
        more_writers=Counter(
            f"{each.stream_name}: {each.condition.value}"
            for each in writers[MOST_SHOWN:]
        ),
        peers=peers[:MOST_SHOWN],
        more_peers=Counter(
            "gone" if each.is_gone else "here" for each in peers[MOST_SHOWN:]
        ),
        instances=sorted(status.instances, key=lambda each: not each.problem),
        verdict=judge(status),
        stalled=model.group_stalls(status.writers),
        nonce=nonce,
        bad=_SIGNS["bad"],
        patience_ms=PATIENCE_MS,
    )
