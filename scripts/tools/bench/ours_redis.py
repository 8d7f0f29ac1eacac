"""Measures of this package over Redis: ``ours_redis.py MEASURE PARAMETERS``."""

from __future__ import annotations

from typing import Any

from scripts.tools.bench import traffic
from scripts.tools.bench.ours_host import CountingSink, Process
from scripts.tools.bench.side import Counting, RedisMeasures, main


def _make(
    reactor: Any,
    instance_name: str,
    counting: Counting,
    port: int,
) -> Process:
    sink = CountingSink(counting)
    return Process(reactor, instance_name, sink)


MEASURES = RedisMeasures(__file__, _make, traffic).by_name()


if __name__ == "__main__":
    main(MEASURES)
