"""A reader that is live, and the tokens that it delivered, for tests."""

from __future__ import annotations

from tests.handlers.fixtures import Receiving, receiving

FAR = 2**62


def live(last_token: int = 5, **options: bool) -> Receiving:
    """Build a reader that is live at token 5."""
    process = receiving(**options)  # type: ignore[arg-type]
    process.stream.last_token = last_token
    process.stream.persist("w", 5, "five")
    process.receive("POSITION events w 4 4", 'RDATA events w 5 ["five"]')
    return process


def tokens(process: Receiving) -> list[int]:
    return process.host.rows.tokens("w")
