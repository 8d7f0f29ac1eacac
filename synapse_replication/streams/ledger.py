"""The tokens of one writer that arrived, for comparison with the committed ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: The most tokens that a ledger stores. Beyond it, ranges are not verified.
MAX_TOKENS: Final = 100_000


class TokenLedger:
    """The tokens above ``verified`` that arrived from one writer.

    :param verified: the token up to which nothing is to be verified any more.
    :ivar unverified: the number of tokens that were committed but not verified, because
        more than :data:`MAX_TOKENS` had arrived.
    """

    def __init__(self, verified: int) -> None:
        self.verified = verified
        self.unverified = 0
        self._arrived: set[int] = set()
        self._is_overfull = False

    def add(self, tokens: Iterable[int]) -> None:
        """Record tokens that arrived."""
        if len(self._arrived) < MAX_TOKENS:
            self._arrived.update(tokens)
        else:
            self._is_overfull = True

    def verify(self, committed: Iterable[int], upto: int) -> list[int]:
        """Return the committed tokens that did not arrive, and forget the range.

        :param committed: all committed tokens in ``(verified, upto]``.
        """
        missing = [token for token in committed if token not in self._arrived]
        if self._is_overfull:
            self.unverified += len(missing)
            missing = []
        self.skip_to(upto)
        return missing

    def skip_to(self, token: int) -> None:
        """Verify nothing up to ``token``."""
        self.verified = max(self.verified, token)
        self._arrived = {each for each in self._arrived if each > self.verified}
        self._is_overfull = self._is_overfull and len(self._arrived) >= MAX_TOKENS
