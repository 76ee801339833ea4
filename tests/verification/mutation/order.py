"""Mutants: messages and tasks in another order, lost, or waited for without end."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.verification.mutation.mutant import OURS, Mutant
from tests.verification.mutation.mutant import row as any_row

ROWS: list[Mutant] = []
row = partial(any_row, ROWS)

PARITY = "tests/train/test_parity.py::test_gradients_are_those_of_the_whole_batch[4-None]"
DELAYS = "tests/runtime/test_readiness.py::test_other_delays_other_orders_same_gradients"


@row(
    bug="A stage kept only the result of its latest backward, so a message sent later had the wrong "
    "gradient.",
    source="pytorch/pytorch#139404",
    target="rrfp_jax.runtime.transport.protocol:LocalTransport.offer",
    here="Every result is offered when its program is dispatched, under a key with its microbatch.",
    tests=[PARITY],
)
def the_latest_backward_for_all(original: Any) -> Any:
    held: dict[int, Any] = {}

    def offer(self: Any, key: Any, arrays: Any) -> None:
        if key.input.direction == 0 or key.input.microbatch > 1:
            original(self, key, arrays)
        elif (first := held.pop(key.stage, None)) is None:
            held[key.stage] = key
        else:
            original(self, first, arrays)
            original(self, key, arrays)
            self.produced(first, 0.0)

    return offer


@row(
    bug="With one buffer fewer, a message was received over data that was still needed.",
    source="deepspeedai/DeepSpeed#2800",
    target="rrfp_jax.runtime.stages.step:ModelStep.receive",
    here="There are no receive buffers: each message has arrays of its own, which its task takes.",
    tests=[PARITY],
)
def one_buffer_for_all_messages(original: Any) -> Any:
    def receive(self: Any, task: Any, arrays: Any) -> None:
        original(self, task, arrays)
        for other in self._arrived:
            if other[:2] == task[:2]:
                self._arrived[other] = self._arrived[task]

    return receive


@row(
    bug="Messages were told apart by their order alone, so the order had to be fixed beforehand.",
    source="msr-fiddle/pipedream#22",
    target="rrfp_jax.runtime.stages.step:ModelStep.run",
    here="A message carries stage, direction, chunk and microbatch, and is filed by that.",
    tests=[DELAYS],
)
def messages_taken_as_they_come(original: Any) -> Any:
    def run(self: Any, task: Any, in_turn: bool) -> Any:
        if task in self._arrived:
            first = next(other for other in self._arrived if other[:2] == task[:2])
            self._arrived[first], self._arrived[task] = self._arrived[task], self._arrived[first]
        return original(self, task, in_turn)

    return run


@row(
    bug="A microbatch's activation is never sent, and all stages wait.",
    source=OURS,
    target="rrfp_jax.core.tasks:Placement.destination",
    here="Where an output goes is a function of its task alone, and all orders of events are explored.",
    tests=["tests/core/test_core.py::TestAnyInterleaving::test_one_chunk"],
)
def an_activation_never_sent(original: Any) -> Any:
    return lambda self, stage, task: None if task == (0, 0, 1) else original(self, stage, task)


@row(
    bug="1F1B deadlocked in its warm-up when there were fewer microbatches than stages.",
    source="pytorch/torchtitan#775",
    target="rrfp_jax.core.orders:_alternate",
    here="The warm-up is no longer than the step, and an order that lacks a task is refused at the start.",
    tests=["tests/core/test_core.py::TestOrders::test_1f1b_with_fewer_microbatches_than_stages"],
)
def a_warm_up_longer_than_the_step(original: Any) -> Any:
    def alternate(forwards: Any, backwards: Any, warmup: int) -> Any:
        order = list(forwards[:warmup])
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        return order + list(backwards[len(forwards) - warmup :])

    return alternate


@row(
    bug="Interleaved 1F1B hung because the communication of the ranks was criss-crossed.",
    source="pytorch/pytorch#127332",
    target="rrfp_jax.core.scheduler:check_can_end",
    here="A fixed order is run without time before the first step; one that cannot end is refused.",
    tests=["tests/core/test_schedules.py::test_orders_that_wait_for_each_other_are_named"],
)
def orders_that_wait_for_each_other(original: Any) -> Any:
    return lambda rules: None


@row(
    bug="A stage waited for a transfer, or for its turn, while it had other work that was ready.",
    source="pytorch/pytorch#172668",
    target="rrfp_jax.core.hints:_Rounds.choose",
    here="A hint that chooses nothing although a task can run is an error that names the task.",
    tests=["tests/core/test_core.py::TestBF::test_a_skipped_direction_keeps_no_credit"],
)
def waits_for_its_turn(original: Any) -> Any:
    def choose(self: Any, state: Any, ready: Any) -> Any:
        choice = original(self, state, ready)
        return choice if choice is None or choice[0].kind.direction == state else None

    return choose


@row(
    bug="Ranks ran collectives and transfers in different orders, and hung without an error.",
    source="marin-community/marin#7655",
    target="rrfp_jax.core.group:Follower._obey",
    here="Ranks of a stage follow the decisions of the first by number, whatever arrives when.",
    tests=[
        "tests/core/test_group.py::TestFollower::test_runs_decisions_in_order_each_once_its_input_is_there"
    ],
)
def decisions_out_of_order(original: Any) -> Any:
    def obey(self: Any) -> Any:
        from rrfp_jax.core.events import Chosen
        from rrfp_jax.core.group import NOTHING, Answer

        for position, task in self._decided.items():
            if dispatch := self.scheduler.handle(Chosen(task)):
                del self._decided[position]
                return Answer(dispatch)
        return NOTHING

    return obey


@row(
    bug="The leader of a stage runs a task that the other ranks never hear of.",
    source=OURS,
    target="rrfp_jax.core.group:Leader._decide",
    here="One answer holds the task and the message, and the message is sent first.",
    tests=["tests/core/test_group.py::TestLeader::test_publishes_what_it_runs"],
)
def a_decision_not_told(original: Any) -> Any:
    return lambda self: original(self)._replace(message=None)


@row(
    bug="A rank that has voted takes in what arrives before the vote ends, and runs another task than it "
    "named.",
    source=OURS,
    target="rrfp_jax.core.group:Unanimous.handle",
    here="What arrives after a rank's own vote counts from the next vote on.",
    tests=[
        "tests/core/test_group.py::TestUnanimous::"
        "test_what_arrives_after_its_proposal_counts_from_the_next_round_on"
    ],
)
def a_vote_not_kept(original: Any) -> Any:
    def handle(self: Any, event: Any) -> Any:
        from rrfp_jax.core.events import Arrived
        from rrfp_jax.core.group import NOTHING

        if not isinstance(event, Arrived):
            return original(self, event)
        self.scheduler.handle(event)
        return NOTHING

    return handle


@row(
    bug="Ranks hung, each blocked in another program, and nothing said so.",
    source="NVIDIA/jaxpp#11",
    target="rrfp_jax.runtime.run.consensus:check_orders",
    here="At the end of a step all ranks compare what they dispatched; a difference is named by rank and "
    "task.",
    tests=["tests/runtime/test_groups.py::test_ranks_of_a_stage_that_dispatched_different_tasks_are_named"],
)
def orders_not_compared(original: Any) -> Any:
    return lambda *arguments: None


@row(
    bug="A process was gone, and the others waited for hours instead of failing.",
    source="jax-ml/jax#19307",
    target="rrfp_jax.runtime.run.membership:Membership.require",
    here="The connections of all processes are watched, and every wait ends with the name of who is gone.",
    tests=["tests/runtime/test_departures.py::TestGone::test_the_most_telling_is_raised"],
)
def nobody_notices_a_death(original: Any) -> Any:
    return lambda self, needed, known=None: None


@row(
    bug="A run of 512 GPUs stopped in the middle of a step, with no error on any rank.",
    source="marin-community/marin#7344",
    target="rrfp_jax.runtime.run.waits:LimitedWait.reached",
    here="Every wait has a limit, and says what it waited for.",
    tests=["tests/train/test_trainer.py::test_a_program_that_hangs_does_not_hold_its_error_back"],
)
def no_limit_on_waiting(original: Any) -> Any:
    return lambda self: False


@row(
    bug="Programs compiled lazily, by some ranks later than by others, while transfers ran: a deadlock.",
    source="marin-community/marin#7655",
    target="rrfp_jax.data.contract:declared_buckets",
    here="All programs of all declared shapes are compiled before the first step, and all ranks wait for "
    "that.",
    tests=["tests/data/test_documents.py::test_shapes_that_the_first_step_lacks_are_compiled_before_it"],
)
def compiled_inside_a_step(original: Any) -> Any:
    return lambda data: []


@row(
    bug="A message that comes twice makes its task run twice.",
    source=OURS,
    target="rrfp_jax.core.progress:Progress.refusal",
    here="An input is taken once; a second one is an error with the microbatch's story.",
    tests=["tests/core/test_core.py::TestIllegalEvents::test_twice"],
)
def an_input_taken_twice(original: Any) -> Any:
    return lambda self, arrived, coming=None: None


@row(
    bug="One output is sent twice under the same name.",
    source=OURS,
    target="rrfp_jax.runtime.transport.protocol:LocalTransport.offer",
    here="Every transport refuses a name that it has offered in this step.",
    tests=["tests/runtime/test_transport.py::test_in_one_process[LocalTransport-offered_twice]"],
)
def offered_twice(original: Any) -> Any:
    def offer(self: Any, key: Any, arrays: Any) -> None:
        self._offers._offered.discard(key)
        original(self, key, arrays)

    return offer


@row(
    bug="A message for the next step is taken for one of this step.",
    source=OURS,
    target="rrfp_jax.runtime.transport.protocol:Rounds.takes",
    here="Messages carry the number of their round; what is early is kept, what is late is dropped.",
    tests=["tests/runtime/test_transport.py::test_a_process_that_is_ready_first_may_send_at_once"],
)
def a_message_of_another_step(original: Any) -> Any:
    return lambda self, key, message: not self.over
