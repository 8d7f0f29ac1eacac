"""Starts the processes of more configurations of the corpus."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from tests.config.test_corpus import CORPUS
from tests.external import skip_reason
from tests.integration import test_corpus

skip = skip_reason("long")


class CorpusProcessesTests(test_corpus.CorpusProcessesTests):
    """Tests with all configurations."""

    names: ClassVar[Collection[str]] = tuple(CORPUS)
