"""Text for display to users."""

from __future__ import annotations

__all__ = ["counted", "printable"]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 stream``, ``1,024 streams``."""
    return f"{count:,} {noun}" + ("s" if count != 1 else "")


def printable(text: str) -> str:
    """Escape control characters, so that a peer's text cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
