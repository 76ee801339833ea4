"""Mutants: messages and tasks in another order, lost, or waited for without end."""

from __future__ import annotations

from typing import Any

from tests.verification.mutation.table import changes


@changes("runtime.transport.protocol:LocalTransport.offer")
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


@changes("runtime.stages.step:ModelStep.receive")
def one_buffer_for_all_messages(original: Any) -> Any:
    def receive(self: Any, task: Any, arrays: Any) -> None:
        original(self, task, arrays)
        for other in self._arrived:
            if other[:2] == task[:2]:
                self._arrived[other] = self._arrived[task]

    return receive


@changes("runtime.stages.step:ModelStep.run")
def messages_taken_as_they_come(original: Any) -> Any:
    def run(self: Any, task: Any, in_turn: bool) -> Any:
        if task in self._arrived:
            first = next(other for other in self._arrived if other[:2] == task[:2])
            self._arrived[first], self._arrived[task] = self._arrived[task], self._arrived[first]
        return original(self, task, in_turn)

    return run


@changes("core.tasks:Placement.destination")
def an_activation_never_sent(original: Any) -> Any:
    return lambda self, stage, task: None if task == (0, 0, 1) else original(self, stage, task)


@changes("core.orders:_alternate")
def a_warm_up_longer_than_the_step(original: Any) -> Any:
    def alternate(forwards: Any, backwards: Any, warmup: int) -> Any:
        order = list(forwards[:warmup])
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        return order + list(backwards[len(forwards) - warmup :])

    return alternate


@changes("core.scheduler:check_can_end")
def orders_that_wait_for_each_other(original: Any) -> Any:
    return lambda rules: None


@changes("core.hints:BF.choose")
def waits_for_its_turn(original: Any) -> Any:
    def choose(self: Any, state: Any, ready: Any) -> Any:
        choice = original(self, state, ready)
        return choice if choice is None or choice[0].kind.direction == state else None

    return choose


@changes("core.scheduler:StageScheduler._foresee")
def what_is_foreseen_holds_back(original: Any) -> Any:
    def foresee(self: Any, room: Any) -> Any:
        left = [self._choose]
        self._choose = lambda late: left.pop()(late) if left else None  # once, and not without it
        try:
            return original(self, room)
        finally:
            del self._choose

    return foresee


@changes("core.group:Follower._obey")
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


@changes("core.group:Leader._decide")
def a_decision_not_told(original: Any) -> Any:
    return lambda self: original(self)._replace(message=None)


@changes("core.group:Unanimous.handle")
def a_vote_not_kept(original: Any) -> Any:
    def handle(self: Any, event: Any) -> Any:
        from rrfp_jax.core.events import Arrived
        from rrfp_jax.core.group import NOTHING

        if not isinstance(event, Arrived):
            return original(self, event)
        self.scheduler.handle(event)
        return NOTHING

    return handle


@changes("runtime.run.consensus:check_orders")
def orders_not_compared(original: Any) -> Any:
    return lambda *arguments: None


@changes("runtime.run.membership:Membership.require")
def nobody_notices_a_death(original: Any) -> Any:
    return lambda self, needed, known=None: None


@changes("runtime.run.waits:LimitedWait.reached")
def no_limit_on_waiting(original: Any) -> Any:
    return lambda self: False


@changes("data.contract:declared_buckets")
def compiled_inside_a_step(original: Any) -> Any:
    return lambda data: []


@changes("core.progress:Progress.refusal")
def an_input_taken_twice(original: Any) -> Any:
    return lambda self, arrived, coming=None: None


@changes("runtime.transport.protocol:LocalTransport.offer")
def offered_twice(original: Any) -> Any:
    def offer(self: Any, key: Any, arrays: Any) -> None:
        self._offers._offered.discard(key)
        original(self, key, arrays)

    return offer


@changes("runtime.transport.protocol:Rounds.takes")
def a_message_of_another_step(original: Any) -> Any:
    return lambda self, key, message: not self.over
