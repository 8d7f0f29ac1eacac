"""Text for display to users."""

from __future__ import annotations

__all__ = ["counted", "printable"]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 stream``, ``1,024 streams``."""
    return f"{count:,} {noun}" + ("s" if count != 1 else "")


def printable(text: str) -> str:
    """Escape unprintable characters, so that text of a peer cannot control a terminal.

    The result is one line.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
