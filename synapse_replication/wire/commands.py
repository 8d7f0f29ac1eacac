"""STUB: see the brief; Command base only so that interfaces type-check."""

class Command:
    NAME: str
