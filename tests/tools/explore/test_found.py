"""Sequences that the exploration found, as it printed them: each failed at first."""

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.explore.search import rest
from scripts.tools.explore.world import Bounds, Event, Kind, World
from synapse_replication.streams import reader

#: A page of a restarted writer is delivered; then a link states the earlier epoch.
STALE_EPOCH: tuple[Event, ...] = (
    ("write",),
    ("write",),
    ("send",),
    ("up", 0),
    ("position", 0),
    ("send",),
    ("message", 0),
    ("message", 0),
    ("writer crash", False),
    ("write",),
    ("answer", False),
    ("page",),
    ("done",),
    ("answer", False),
    ("page",),
    ("epoch", 0),
)


class FoundTests(SynchronousTestCase):
    """The shortest sequence of events for each defect."""

    def apply(self, kind: Kind, bounds: Bounds, *events: Event) -> World:
        """Apply events, except those that cannot happen any more."""
        world = World.begin(kind, bounds)
        for event in events:
            if event in world.events():
                world.apply(event)
        return world

    def check(self, kind: Kind, bounds: Bounds, *events: Event) -> None:
        """Apply events, which break no promise, and let the world come to rest."""
        self.assertIsNone(rest(self.apply(kind, bounds, *events)))

    def test_implausible_position(self) -> None:
        """A link that claims less than an implausible position contradicts itself."""
        self.check(
            Kind.DATABASE,
            Bounds(ids=2, lies=1),
            ("up", 0),
            ("lie", 0, 0, 2),
            ("allocate",),
            ("commit", 1),
        )

    def test_page_without_rows_that_arrived(self) -> None:
        """A page is only complete below the first row that it lacks."""
        self.check(
            Kind.DATABASE,
            Bounds(ids=2, lies=1),
            ("up", 0),
            ("lie", 0, 0, 3),
            ("allocate",),
            ("answer", False),
            ("allocate",),
            ("commit", 1),
            ("commit", 2),
            ("send",),
            ("message", 0),
            ("send",),
            ("message", 0),
            ("message", 0),
        )

    def test_row_missing_in_the_page_that_is_delivered(self) -> None:
        """A row given up while its page, which lacks it, is delivered is fetched."""
        self.check(
            Kind.DATABASE,
            Bounds(ids=2, overflows=1, lies=1),
            ("up", 0),
            ("lie", 0, 0, 3),
            ("allocate",),
            ("allocate",),
            ("commit", 2),
            ("answer", False),
            ("commit", 1),
            ("send",),
            ("page",),
            ("overflow",),
            ("message", 0),
            ("drained",),
        )

    def test_claims_after_a_false_bound(self) -> None:
        """Tokens above the last row of a page are fetched again for later claims."""
        self.check(
            Kind.DATABASE,
            Bounds(ids=2, lies=1, writer_crashes=1),
            ("up", 0),
            ("lie", 0, 1, 1),
            ("answer", False),
            ("allocate",),
            ("allocate",),
            ("commit", 1),
            ("commit", 2),
            ("writer crash", False),
            ("message", 0),
        )

    def test_claims_after_a_refuted_one(self) -> None:
        """The same holds if the bound was refuted."""
        self.check(
            Kind.DATABASE,
            Bounds(ids=2, breaks=1, lies=1),
            ("up", 0),
            ("lie", 0, 0, 3),
            ("allocate",),
            ("answer", False),
            ("allocate",),
            ("commit", 1),
            ("commit", 2),
            ("send",),
            ("send",),
            ("break", 0),
            ("up", 0),
            ("report", 0),
        )

    def test_claim_of_a_lost_link(self) -> None:
        """What a link claimed before it was lost is contradicted by the next link."""
        self.check(
            Kind.DATABASE,
            Bounds(ids=2, breaks=1, lies=1),
            ("up", 0),
            ("lie", 0, 1, 1),
            ("break", 0),
        )

    def test_row_delivered_although_its_page_is_obsolete(self) -> None:
        """A row that the sink was handling is not delivered again."""
        self.check(
            Kind.DATABASE,
            Bounds(ids=2, overflows=1, lies=1),
            ("up", 0),
            ("lie", 0, 0, 2),
            ("allocate",),
            ("answer", False),
            ("page",),
            ("done",),
            ("lie", 0, 2, 2),
            ("allocate",),
            ("commit", 2),
            ("answer", False),
            ("commit", 1),
            ("send",),
            ("page",),
            ("overflow",),
            ("message", 0),
            ("drained",),
        )

    def test_repeated_claims_do_not_delay_a_fetch(self) -> None:
        """A claim does not delay a fetch that waits already."""
        self.patch(reader, "BURST", 1)
        self.check(
            Kind.DATABASE,
            Bounds(ids=1, lies=1, burst=1),
            ("up", 0),
            ("lie", 0, 0, 2),
            ("answer", False),
            ("page",),
            ("lie", 0, 0, 2),
            ("moment",),
            ("lie", 0, 0, 2),
            ("moment",),
            ("lie", 0, 0, 2),
        )

    def test_epoch_given_up_while_the_position_advances(self) -> None:
        """An epoch that arrives during an advance is not forgotten."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, overflows=1),
            ("up", 0),
            ("position", 0),
            ("overflow",),
            ("first hello", 0),
            ("drained",),
            ("write",),
            ("send",),
            ("message", 0),
            ("epoch", 0),
        )

    def test_page_overtakes_rows_of_the_old_process(self) -> None:
        """After a page of a new process, rows of the old one are not delivered."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, writer_crashes=1),
            ("write",),
            ("write",),
            ("send",),
            ("up", 0),
            ("position", 0),
            ("send",),
            ("writer crash", False),
            ("write",),
            ("answer", False),
            ("page",),
            ("message", 0),
            ("message", 0),
        )

    def test_stale_epoch_during_a_fetch(self) -> None:
        """A page does not begin an epoch that another process stated before."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, writer_crashes=1),
            ("write",),
            ("write",),
            ("send",),
            ("up", 0),
            ("epoch", 0),
            ("report", 0),
            ("send",),
            ("writer crash", False),
            ("answer", False),
            ("page",),
            ("report", 0),
            ("epoch", 0),
            ("write",),
            ("answer", False),
            ("page",),
            ("message", 0),
            ("message", 0),
        )

    def test_position_of_a_new_process_behind_its_page(self) -> None:
        """What an old process claimed does not contradict a new one."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, writer_crashes=1),
            ("write",),
            ("send",),
            ("up", 0),
            ("position", 0),
            ("writer crash", False),
            ("message", 0),
            ("write",),
            ("answer", False),
            ("page",),
            ("position", 0),
            ("send",),
            ("message", 0),
        )

    def test_epoch_on_a_slower_link(self) -> None:
        """An epoch that a slower link states first costs no second delivery."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, links=2),
            ("up", 0),
            ("up", 1),
            ("position", 1),
            ("position", 0),
            ("write",),
            ("send",),
            ("message", 0),
            ("epoch", 1),
            ("message", 1),
        )

    def test_epoch_on_a_slower_link_after_a_loss(self) -> None:
        """A lower POSITION on a link that has stated the epoch is no restart."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, links=2, breaks=1, failures=1, total=1),
            ("up", 0),
            ("up", 1),
            ("position", 1),
            ("done",),
            ("position", 0),
            ("done",),
            ("write",),
            ("write",),
            ("send",),
            ("message", 0),
            ("done",),
            ("send",),
            ("break", 0),
            ("up", 0),
            ("epoch", 1),
            ("position", 0),
            ("answer", False),
            ("page",),
            ("position", 1),
            ("position", 0),
            ("answer", False),
            ("page",),
            ("done",),
        )

    def test_obsolete_target_on_a_new_link(self) -> None:
        """A claim that a page has refuted is not evidence about a new link."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, links=2, writer_crashes=1),
            *STALE_EPOCH,
            ("answer", False),
            ("send",),
            ("up", 1),
            ("page",),
            ("done",),
            ("message", 0),
            ("message", 0),
            ("answer", False),
            ("page",),
            ("position", 1),
            ("answer", False),
            ("page",),
        )

    def test_obsolete_doubt_on_a_new_link(self) -> None:
        """So, too, if the token was implausible."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, links=2, writer_crashes=1),
            ("write",),
            ("write",),
            ("send",),
            ("send",),
            ("up", 0),
            ("writer crash", False),
            ("epoch", 0),
            ("report", 0),
            ("answer", False),
            ("page",),
            ("done",),
            ("write",),
            ("write",),
            ("answer", True),
            ("send",),
            ("up", 1),
            ("message", 0),
            ("message", 0),
            ("page",),
            ("position", 1),
            ("done",),
            ("answer", False),
            ("page",),
        )

    def test_first_epoch_of_a_new_link(self) -> None:
        """A new link is not compared with the claims about an earlier process."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, links=2, writer_crashes=1),
            *STALE_EPOCH,
            ("write",),
            ("send",),
            ("up", 1),
            ("epoch", 1),
            ("message", 0),
            ("message", 0),
            ("answer", True),
            ("page",),
            ("report", 1),
            ("done",),
            ("answer", False),
            ("page",),
        )

    def test_epoch_of_a_new_link_that_is_known(self) -> None:
        """So, too, if another link stated the epoch first."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, links=2, writer_crashes=1),
            *STALE_EPOCH,
            ("write",),
            ("send",),
            ("up", 1),
            ("message", 0),
            ("message", 0),
            ("epoch", 1),
            ("answer", True),
            ("page",),
            ("report", 1),
            ("done",),
            ("answer", False),
            ("page",),
        )

    def test_page_ahead_of_a_new_link(self) -> None:
        """A new link may be behind a page of the process whose epoch is known."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, links=2, writer_crashes=1),
            *STALE_EPOCH,
            ("write",),
            ("answer", False),
            ("page",),
            ("done",),
            ("answer", True),
            ("send",),
            ("up", 1),
            ("message", 0),
            ("message", 0),
            ("page",),
            ("position", 1),
            ("done",),
            ("answer", False),
            ("page",),
        )

    def test_new_link_while_an_earlier_process_is_assumed(self) -> None:
        """When an epoch begins, links that have carried nothing are not compared."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, links=2, writer_crashes=1),
            *STALE_EPOCH,
            ("write",),
            ("answer", False),
            ("page",),
            ("done",),
            ("answer", True),
            ("page",),
            ("done",),
            ("epoch", 0),
            ("send",),
            ("up", 1),
            ("epoch", 1),
            ("message", 0),
            ("message", 0),
            ("answer", True),
            ("page",),
            ("report", 1),
            ("done",),
            ("answer", False),
            ("page",),
        )

    def test_row_of_an_earlier_process_on_a_slower_link(self) -> None:
        """The epoch of one link is not that of a row that another one carried first."""
        for stated in ((), (("epoch", 0),)):
            self.check(
                Kind.MEMORY,
                Bounds(ids=2, links=2, writer_crashes=1),
                ("write",),
                ("write",),
                ("send",),
                ("up", 0),
                ("send",),
                ("writer crash", False),
                ("up", 1),
                ("position", 1),
                ("write",),
                ("write",),
                ("send",),
                ("message", 1),
                ("position", 0),
                ("message", 0),
                ("message", 0),
                *stated,
                ("send",),
                ("message", 1),
                ("message", 1),
                ("epoch", 1),
            )

    def test_row_of_a_range_that_was_said_to_be_empty(self) -> None:
        """A row above the last delivered one refutes a claim, in memory as well."""
        self.check(
            Kind.STOCK_MEMORY,
            Bounds(ids=2, lies=1),
            ("up", 0),
            ("lie", 0, 0, 1),
            ("write",),
        )

    def test_restart_after_an_implausible_claim(self) -> None:
        """A lower POSITION during a fetch is a restart."""
        self.check(
            Kind.STOCK_MEMORY,
            Bounds(ids=2, writer_crashes=1),
            ("write",),
            ("write",),
            ("send",),
            ("send",),
            ("up", 0),
            ("report", 0),
            ("answer", True),
            ("writer crash", False),
            ("message", 0),
            ("write",),
        )

    def test_restart_while_a_row_is_delivered(self) -> None:
        """A row that the sink is handling is of the old process."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, overflows=1, writer_crashes=1),
            ("up", 0),
            ("position", 0),
            ("done",),
            ("write",),
            ("send",),
            ("writer crash", False),
            ("message", 0),
            ("overflow",),
            ("message", 0),
            ("drained",),
        )

    def test_stale_epoch_while_a_page_is_delivered(self) -> None:
        """A row that the sink is handling does not become one of another epoch."""
        self.check(
            Kind.MEMORY,
            Bounds(ids=2, writer_crashes=1, overflows=1),
            ("write",),
            ("write",),
            ("send",),
            ("up", 0),
            ("epoch", 0),
            ("done",),
            ("report", 0),
            ("send",),
            ("writer crash", False),
            ("write",),
            ("answer", False),
            ("page",),
            ("done",),
            ("done",),
            ("answer", False),
            ("page",),
            ("overflow",),
            ("epoch", 0),
            ("drained",),
            ("message", 0),
            ("message", 0),
        )
