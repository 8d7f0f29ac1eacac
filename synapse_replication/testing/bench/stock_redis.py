"""A real Synapse's side over Redis: ``python stock_redis.py MEASURE PARAMETERS``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from side import Child, Counting, main, percentiles, run
from stock_host import CountingDataHandler, Process
from traffic import READER, WRITER, row_of

_TRAFFIC = str(Path(__file__).with_name("traffic.py"))

__all__ = ["MEASURES"]


def receive(port: int, rows: int, pure_python: bool) -> dict[str, float]:
    """Receive and handle rows that a plain socket publishes flat out."""

    if pure_python:
        # The driver takes it if it can be imported, and else has its own.
        sys.modules["hiredis"] = None  # type: ignore[assignment]

    async def work(reactor: Any) -> dict[str, float]:
        counting = Counting(rows)
        process = Process(reactor, READER, CountingDataHandler(counting), port)
        publisher = Child(_TRAFFIC, "publish", str(port), "rows", str(rows))
        try:
            process.connect_redis(port)
            await process.connected()
            await publisher.answer()
            started = time.monotonic()
            publisher.go()
            await counting.done
        finally:
            publisher.stop()
        return {"seconds": counting.finished - started}

    result: dict[str, float] = run(work)
    return result


def send(port: int, rows: int) -> dict[str, float]:
    """Send rows flat out to Redis, where a plain socket subscribes."""

    async def work(reactor: Any) -> dict[str, float]:
        process = Process(reactor, WRITER, CountingDataHandler(Counting(0)), port)
        subscriber = Child(_TRAFFIC, "count_rows", str(port), str(rows))
        try:
            process.connect_redis(port)
            await process.connected()
            process.start_streamer()
            await subscriber.answer()
            made = [row_of(n) for n in range(1, rows + 1)]
            started = time.monotonic()
            process.write(made)
            finished = (await subscriber.answer())["finished"]
        finally:
            subscriber.stop()
        return {"seconds": finished - started}

    result: dict[str, float] = run(work)
    return result


def end_to_end(port: int, rows: int, readers: int, rate: int) -> dict[str, float]:
    """Write rows in this process; readers, each in another, handle them all.

    :param rate: rows a s; 0 for flat out.
    """

    async def work(reactor: Any) -> dict[str, float]:
        process = Process(reactor, WRITER, CountingDataHandler(Counting(0)), port)
        children = [
            Child(__file__, "read", json.dumps([port, rows, rate, f"reader{n}"]))
            for n in range(readers)
        ]
        try:
            process.connect_redis(port)
            await process.connected()
            process.start_streamer()
            for child in children:
                await child.answer()
            made = [row_of(n) for n in range(1, rows + 1)]
            started = time.monotonic()
            if rate:
                process.write_at_rate(rows, rate)
            else:
                process.write(made)
            results = [await child.answer() for child in children]
        finally:
            for child in children:
                child.stop()
        if rate:
            return {key: max(r[key] for r in results) for key in ("p50", "p99")}
        return {"seconds": max(r["finished"] for r in results) - started}

    result: dict[str, float] = run(work)
    return result


def read(port: int, rows: int, rate: int, name: str) -> dict[str, float]:
    """Be a reader; say when a writer was heard of, then when all rows came."""

    async def work(reactor: Any) -> dict[str, float]:
        counting = Counting(rows, timed=rate > 0)
        process = Process(reactor, name, CountingDataHandler(counting), port)
        process.connect_redis(port)
        await counting.connected
        print('"ready"', flush=True)  # noqa: T201 -- its answer
        await counting.done
        times = percentiles(counting.seconds) if rate else {}
        return {"finished": counting.finished, **times}

    result: dict[str, float] = run(work)
    return result


def idle(port: int, lines: int) -> dict[str, float]:
    """Take the CPU time of a process while USER_IP is published for others."""

    async def work(reactor: Any) -> dict[str, float]:
        process = Process(reactor, READER, CountingDataHandler(Counting(0)), port)
        publisher = Child(_TRAFFIC, "publish", str(port), "user_ips", str(lines))
        try:
            process.connect_redis(port)
            await process.connected()
            await publisher.answer()
            await process.sleep(0.5)
            started = time.process_time()
            publisher.go()
            await publisher.answer()
            await process.sleep(0.2)
            spent = time.process_time() - started
        finally:
            publisher.stop()
        return {"cpu": 1000 * spent}

    result: dict[str, float] = run(work)
    return result


MEASURES: dict[str, Any] = {
    "receive": receive,
    "send": send,
    "end_to_end": end_to_end,
    "read": read,
    "idle": idle,
}


if __name__ == "__main__":
    main(MEASURES)
