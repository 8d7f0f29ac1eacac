"""A limit on the rate of similar log lines."""

from __future__ import annotations

from collections.abc import Callable, Hashable

#: The period, in s, in which lines of one kind are suppressed after the first one or,
#: if a burst is allowed, after the burst.
REPEAT_AFTER = 60.0
#: The maximum number of kinds of lines that are counted.
MAX_KEYS = 1000
#: The default maximum number of lines of one group that are written within
#: REPEAT_AFTER, whatever names they contain.
MAX_OF_GROUP = 100


class RateLimit:
    """Limits the rate of similar log lines within :data:`REPEAT_AFTER`.

    Each kind of line has a limit. Because a peer can create new kinds by inventing
    names, each group of kinds has a limit, too.

    :param monotonic: returns a monotonic time in s.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: By kind: the start of the current period, and the number of lines in it.
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        #: By group: the start of the current period, the number of lines written in it,
        #: and the number of suppressed lines that the next written line must report. A
        #: line that the limit of its kind suppresses is counted in ``_kinds`` first.
        self._groups: dict[str, tuple[float, int, int]] = {}

    def admit(
        self,
        group: str,
        *kind: Hashable,
        burst: int = 1,
        most: int = MAX_OF_GROUP,
    ) -> int | None:
        """Decide whether to write a line of this kind.

        :param group: a name from a fixed set; only ``kind`` may contain a peer's text.
        :param burst: the most lines of the kind to write in one period.
        :param most: the most lines of the group to write in one period.
        :return: the number of similar lines that were suppressed before this one;
            ``None`` if this line is to be suppressed.
        """
        of_kind = self._admit_kind((group, *kind), burst)
        if of_kind is None:
            return None
        now = self._monotonic()
        since, written, of_group = self._groups.get(group, (now, 0, 0))
        if now - since >= REPEAT_AFTER:
            since, written = now, 0
        if written >= most:
            self._groups[group] = (since, written, of_group + of_kind + 1)
            return None
        self._groups[group] = (since, written + 1, 0)
        return of_kind + of_group

    def _admit_kind(self, kind: Hashable, burst: int) -> int | None:
        now = self._monotonic()
        began, count = self._kinds.get(kind, (None, 0))
        if began is not None and now - began < REPEAT_AFTER:
            self._kinds[kind] = (began, count + 1)
            return 0 if count < burst else None
        self._kinds.pop(kind, None)
        if len(self._kinds) >= MAX_KEYS:
            # The dict is in the order in which the periods began: evict the oldest.
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = (now, 1)
        return max(0, count - burst)
