"""Ranks of a group that agree on one sequence: events and messages in, instructions and messages out."""

import pytest

from rrfp_jax.core.events import ROOM, Arrived, Chosen, IllegalEvent, Room
from rrfp_jax.core.group import Alone, ArrivalReport, Decision, Proposal, member, partners
from rrfp_jax.core.hints import BF, BPriority
from rrfp_jax.core.orders import OneFOneB
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import INPUT, Placement, Task
from tests.support.small_step import B, Dispatch, F
from tests.verification.exploration.space import recipients


def rank(number, ranks=2, protocol="leader", stage=1, schedule=None, **kwargs):
    rules = StepRules(placement=Placement(2), microbatches=3, schedule=schedule or BF(), **kwargs)
    return member(StageScheduler(stage, rules), number, ranks, protocol)


def told(machine, *events):
    """What a machine says and dispatches on some events, all in a row."""
    answers = [machine.handle(event) for event in events]
    return [each for dispatch, message in answers for each in (message, dispatch) if each is not None]


class TestLeader:
    def test_publishes_what_it_runs(self):
        leader = rank(0)
        events = Arrived(F(1).input), ArrivalReport(1, F(1).input), ROOM, ROOM
        assert told(leader, *events) == [
            *(Decision(0, F(1)), Dispatch(F(1))),
            *(Decision(1, B(1)), Dispatch(B(1))),
        ]

    def test_prefers_what_has_arrived_on_every_rank(self):
        leader = rank(0)
        told(leader, Arrived(F(0).input), Arrived(F(1).input), ArrivalReport(1, F(1).input))
        assert leader.handle(ROOM).message == Decision(0, F(1))

    def test_prefers_it_to_what_its_hint_ranks_higher(self):
        leader = rank(0, stage=0, schedule=BPriority())
        told(leader, ROOM, Arrived(B(0).input))
        assert leader.handle(ROOM).message == Decision(1, F(1))
        leader.handle(ArrivalReport(1, B(0).input))
        assert leader.handle(ROOM).message == Decision(2, B(0))

    def test_does_not_wait_for_it(self):
        assert told(rank(0), Arrived(F(0).input), ROOM) == [Decision(0, F(0)), Dispatch(F(0))]

    def test_needs_reports_of_all_ranks_and_its_own_arrival(self):
        leader = rank(0, ranks=3)
        told(
            leader,
            ArrivalReport(2, F(1).input),
            ArrivalReport(1, F(1).input),
            Arrived(F(0).input),
            ArrivalReport(1, F(0).input),
        )
        assert leader.handle(ROOM).message == Decision(0, F(0))  # F1 is not here yet
        told(leader, Arrived(F(1).input), Arrived(F(2).input), ArrivalReport(1, F(2).input))
        told(leader, ROOM)  # the backward of F0
        assert leader.handle(ROOM).message == Decision(2, F(1))

    def test_a_split_backward_is_reported_by_its_arrival(self):
        leader = rank(0, schedule=split_bf(), stage=0)
        told(leader, ROOM, ROOM, ROOM, Arrived(B(0).input), Arrived(B(1).input), ArrivalReport(1, B(1).input))
        assert leader.handle(ROOM).message == Decision(3, Task(INPUT, 0, 1))

    def test_illegal(self):
        leader = rank(0)
        for event in (
            ArrivalReport(0, F(0).input),
            ArrivalReport(2, F(0).input),
            Decision(0, F(0)),
            Chosen(F(0)),
        ):
            with pytest.raises(IllegalEvent, match="expected"):
                leader.handle(event)


def split_bf():
    class Split(BF):
        def split(self, stage, placement, microbatches):
            return {(0, j) for j in range(microbatches)}

    return Split()


class TestFollower:
    def test_reports_what_arrives(self):
        assert told(rank(1), Arrived(F(2).input)) == [ArrivalReport(1, F(2).input)]

    def test_runs_decisions_in_order_each_once_its_input_is_there(self):
        follower = rank(1)
        assert told(follower, Arrived(F(1).input), Decision(1, F(1)), ROOM) == [ArrivalReport(1, F(1).input)]
        assert str(follower.awaited()) == "the leader's decision"
        assert told(follower, Decision(0, F(0)), ROOM) == []
        assert str(follower.awaited()) == "the input of F0, which the leader chose"
        assert told(follower, Arrived(F(0).input), ROOM, ROOM) == [
            ArrivalReport(1, F(0).input),
            Dispatch(F(0)),
            Dispatch(F(1)),
        ]

    def test_asks_neither_hint_nor_admission(self):
        follower = rank(1, limit=1)
        told(follower, Arrived(F(1).input), Decision(0, F(1)))
        assert told(follower, ROOM) == [Dispatch(F(1))]  # F0 is not admitted: it would be held back
        assert follower.scheduler.in_flight == 1

    def test_adds_gradients_as_the_leader_does(self):
        events = [Arrived(F(1).input), Arrived(F(0).input)]
        decisions = [Decision(at, task) for at, task in enumerate((F(1), B(1), F(0), B(0)))]
        follower = rank(1)
        _, _, *dispatches = told(follower, *events, *decisions, *[ROOM] * 4)
        assert [dispatch.additions for dispatch in dispatches] == [(), (), (), (0, 1)]

    def test_keeps_a_gradient_until_it_has_run_the_forward(self):
        """Others have, and one of them has sent what it computed for all."""
        follower = rank(1, stage=0)
        assert told(follower, Arrived(B(0).input), ROOM) == [ArrivalReport(1, B(0).input)]
        with pytest.raises(IllegalEvent, match="each input once"):
            follower.handle(Arrived(B(0).input))
        told(follower, *(Decision(at, task) for at, task in enumerate((F(1), F(0), B(0)))))
        ran = told(follower, ROOM, ROOM, ROOM)
        assert [dispatch.task for dispatch in ran] == [F(1), F(0), B(0)]

    def test_illegal(self):
        follower = rank(1)
        told(follower, Arrived(F(0).input), Decision(0, F(0)))
        for event in (Decision(0, F(1)), ArrivalReport(1, F(0).input)):
            with pytest.raises(IllegalEvent, match="expected"):
                follower.handle(event)
        told(follower, ROOM, Decision(1, F(0)))
        said = r"chosen F0.* each once; .* recently: arrived F0, dispatched F0"
        with pytest.raises(IllegalEvent, match=said):
            follower.handle(ROOM)


class TestUnanimous:
    def voter(self, number=0, ranks=2, **kwargs):
        return rank(number, ranks, "unanimous", **kwargs)

    def test_all_run_what_all_propose(self):
        voter = self.voter()
        assert told(voter, Arrived(F(0).input), ROOM) == [Proposal(0, 0, F(0))]
        assert str(voter.awaited()) == "the proposals of members 1"
        assert told(voter, ROOM, Proposal(0, 1, F(0))) == [Dispatch(F(0))]

    def test_nobody_runs_otherwise_and_nothing_advances(self):
        voter = self.voter(stage=0)
        told(voter, ROOM, Proposal(0, 1, F(0)), Arrived(B(0).input))  # BF's next turn is a backward's
        for number, other in ((1, F(1)), (0, None)):
            assert told(voter, Proposal(number, 1, other), ROOM) == [Proposal(number, 0, B(0))]
        assert told(voter, Proposal(1, 1, B(0)), ROOM) == [
            Proposal(1, 0, B(0)),
            Dispatch(B(0), additions=(0,)),
        ]

    def test_what_arrives_after_its_proposal_counts_from_the_next_round_on(self):
        voter = self.voter()
        told(voter, Arrived(F(1).input), ROOM, Arrived(F(0).input))
        assert told(voter, Proposal(0, 1, F(1))) == [Dispatch(F(1))]
        assert voter.scheduler.ready_tasks() == [F(0), B(1)]

    def test_proposes_anew_once_something_arrives_or_another_does(self):
        voter = self.voter()
        told(voter, Arrived(F(0).input), ROOM, Proposal(0, 1, F(1)))
        assert told(voter, ROOM) == []
        assert told(voter, Proposal(1, 1, F(0)), ROOM) == [Proposal(1, 0, F(0)), Dispatch(F(0))]
        voter = self.voter()
        told(voter, Arrived(F(0).input), ROOM, Proposal(0, 1, F(1)))
        assert told(voter, Arrived(F(1).input), ROOM) == [Proposal(1, 0, F(0))]

    def test_silent_as_long_as_nobody_has_anything(self):
        voter = self.voter()
        assert told(voter, ROOM) == []
        assert told(voter, Proposal(0, 1, F(0)), ROOM) == [Proposal(0, 0, None)]

    def test_a_rank_may_be_one_round_ahead(self):
        voter = self.voter(ranks=3)
        told(voter, Arrived(F(0).input), ROOM, Proposal(0, 1, F(0)), Proposal(1, 1, F(1)))
        assert told(voter, Proposal(0, 2, F(0))) == [Dispatch(F(0))]
        with pytest.raises(IllegalEvent, match="one proposal a round"):
            voter.handle(Proposal(1, 1, F(2)))

    def test_an_input_that_comes_twice_is_refused_and_takes_nothing_with_it(self):
        voter = self.voter()
        told(voter, Arrived(F(0).input), ROOM, Arrived(F(1).input))
        for again in (F(0), F(1)):
            with pytest.raises(IllegalEvent, match="each input once"):
                voter.handle(Arrived(again.input))
        assert told(voter, Proposal(0, 1, F(0))) == [Dispatch(F(0))]
        assert voter.scheduler.ready_tasks() == [F(1), B(0)]

    def test_an_input_that_is_refused_is_no_reason_to_propose_anew(self):
        voter = self.voter()
        told(voter, Arrived(F(0).input), ROOM, Proposal(0, 1, F(1)))
        with pytest.raises(IllegalEvent, match="each input once"):
            voter.handle(Arrived(F(0).input))
        assert told(voter, ROOM) == []

    def test_a_gradient_may_come_before_this_rank_knows_that_all_ran_the_forward(self):
        voter = self.voter(stage=0)
        told(voter, ROOM)
        with pytest.raises(IllegalEvent, match="only after the microbatch's own forward"):
            voter.handle(Arrived(B(1).input))
        told(voter, Arrived(B(0).input))
        assert told(voter, Proposal(0, 1, F(0))) == [Dispatch(F(0))]
        assert B(0) in voter.scheduler.ready_tasks()

    def test_illegal(self):
        for event in (Proposal(0, 0, None), Proposal(0, 2, None), Decision(0, F(0))):
            with pytest.raises(IllegalEvent, match="expected"):
                self.voter().handle(event)


def test_where_there_is_nothing_to_agree_on_there_is_no_machine():
    for alone in (rank(0, ranks=1), rank(1, schedule=OneFOneB())):
        assert isinstance(alone, Alone)
        with pytest.raises(IllegalEvent, match="nothing to agree on"):
            alone.handle(Decision(0, F(0)))


def test_a_gradient_may_come_early_where_others_share_a_fixed_order():
    shared, only = (rank(0, ranks=ranks, stage=0, schedule=OneFOneB()) for ranks in (2, 1))
    ran = told(shared, Arrived(B(0).input), ROOM, ROOM, ROOM)
    assert [dispatch.task for dispatch in ran] == [F(0), F(1), B(0)]
    with pytest.raises(IllegalEvent, match="only after the microbatch's own forward"):
        only.handle(Arrived(B(0).input))


def test_recipients():
    assert list(recipients(ArrivalReport(2, F(0).input), 4)) == [0]
    assert list(recipients(Decision(0, F(0)), 4)) == [1, 2, 3]
    assert list(recipients(Proposal(0, 2, None), 4)) == [0, 1, 3]


def test_partners_are_whoever_a_message_is_for():
    assert list(partners(2, 4, "leader")) == [0]
    assert list(partners(0, 3, "leader")) == [1, 2]
    assert list(partners(1, 3, "unanimous")) == [0, 2]


def test_late_tasks_run_when_nothing_else_can():
    scheduler = rank(0, ranks=1).scheduler
    for j in (0, 1):
        scheduler.handle(Arrived(F(j).input))
    assert scheduler.handle(Room({F(0)})) == Dispatch(F(1))
    assert scheduler.handle(Room({F(0), B(1)})) == Dispatch(B(1))  # both are: then by the hint
    assert scheduler.handle(Room({F(0)})) == Dispatch(F(0))


def test_what_would_be_dispatched_can_be_asked_without_effect():
    scheduler = rank(0, ranks=1).scheduler
    assert scheduler.choice() is None
    scheduler.handle(Arrived(F(2).input))
    assert [scheduler.choice() for _ in range(3)] == [F(2)] * 3
    assert scheduler.handle(ROOM) == Dispatch(F(2))
