"""The tokens of one writer that arrived, for comparison with the committed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

#: The most tokens that a ledger stores. If more arrive, they are not verified.
MAX_RECORDED: Final = 100_000


class TokenLedger:
    """The tokens above ``verified`` that arrived from one writer.

    :param verified: the token up to which nothing is to be verified any more.
    """

    def __init__(self, verified: int) -> None:
        self.verified = verified
        #: The tokens as they arrived. To add many costs no more than to add one.
        self._arrived: list[Iterable[int]] = []
        self._count = 0

    def add(self, tokens: Sequence[int]) -> bool:
        """Record tokens that arrived, if there is room for them.

        :return: whether there was; otherwise, the caller must begin a new ledger, since
            this one would take the tokens for missing ones.
        """
        self._count += len(tokens)
        if self._count > MAX_RECORDED:
            return False
        self._arrived.append(tokens)
        return True

    def verify(self, committed: Sequence[int], upto: int, limit: int) -> list[int]:
        """Return the committed tokens that did not arrive, and forget the range.

        :param committed: all committed tokens in ``(verified, upto]``, in order. If the
            ledger is newer than the range, lower ones are ignored.
        :param limit: the most tokens to return. Those above the last of them remain to
            be verified.
        """
        arrived = set().union(*self._arrived)
        missing = [
            token
            for token in committed
            if token > self.verified and token not in arrived
        ]
        if len(missing) > limit:
            upto = missing[limit - 1]
        self.skip_to(upto)
        return missing[:limit]

    def rewind(self, token: int) -> None:
        """Verify again what follows ``token``, to which the writer was moved back."""
        self.verified = min(self.verified, token)

    def skip_to(self, token: int) -> None:
        """Verify nothing up to ``token``."""
        self.verified = max(self.verified, token)
        arrived = set().union(*self._arrived)
        remaining = {each for each in arrived if each > self.verified}
        self._arrived, self._count = [remaining], len(remaining)
