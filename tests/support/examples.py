"""Examples of Hypothesis, drawn before they are used."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import Phase, given, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")


def draw_examples(strategy: SearchStrategy[T], count: int) -> list[T]:
    """Return examples that one query or job can use together.

    Each takes Spark a second, whatever its rows. The examples are the same each time.
    """
    examples: list[T] = []

    @settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=count,
        phases=[Phase.generate],
    )
    @given(strategy)
    def draw(example: T) -> None:
        examples.append(example)

    draw()
    return examples
