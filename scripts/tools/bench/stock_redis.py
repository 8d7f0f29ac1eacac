"""Measures of stock Synapse over Redis: ``stock_redis.py MEASURE PARAMETERS``."""

from __future__ import annotations

from typing import Any

import traffic
from side import Counting, RedisMeasures, main
from stock_host import CountingDataHandler, Process


def _make(
    reactor: Any,
    instance_name: str,
    counting: Counting,
    port: int,
) -> Process:
    return Process(reactor, instance_name, CountingDataHandler(counting), port)


MEASURES = RedisMeasures(__file__, _make, traffic).by_name()


if __name__ == "__main__":
    main(MEASURES)
