"""Text that others made up, for people to read."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Escape control characters: names and rows of others must not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
