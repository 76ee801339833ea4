"""What must hold in a scheduler after every event; a look costs a pass over all tasks."""

from rrfp_jax.core.progress import DISPATCHED, READY, WAITING, ReadyBy
from rrfp_jax.core.tasks import CHARGES, KINDS


def check_invariants(scheduler):
    progress, rules = scheduler._progress, scheduler.rules
    check_rows(progress)
    every = [task for rows in rules.names.values() for row in rows for task in row]
    past = [task.kind for task in every if progress.state(task) == DISPATCHED]
    assert len(past) + scheduler._remaining == scheduler.tasks
    if rules.charges_by_chunk and not rules.forward_only:
        held = sum(CHARGES[kind] for kind in past)
        assert held == scheduler.in_flight, f"{held} in flight, {scheduler.in_flight} accounted for"
    if (limit := rules.admission_limit) is not None:
        most = limit * rules.placement.chunks
        assert scheduler.in_flight <= most, f"{scheduler.in_flight} in flight, limit {most}"
    accumulator = scheduler._accumulator
    assert accumulator.parked <= accumulator.spare
    if scheduler.finished:
        assert not scheduler.ready_tasks() and scheduler.in_flight == 0 and accumulator.parked == 0


def check_rows(progress):
    for row in progress.all_rows:
        ready = [task for task, state in zip(row.tasks, row.states, strict=True) if state == READY]
        assert list(row) == ready
        assert row.ready == len(ready)
        assert row.lowest == (ready[0].microbatch if ready else -1)
        for j, task in enumerate(row.tasks if row.predecessor else ()):
            before, after = row.predecessor.tasks[j], KINDS[task.kind].after
            past = row.predecessor.states[j] == DISPATCHED and before.kind is after
            assert past or row.states[j] == WAITING, f"{task} before {before}"
            if row.by is ReadyBy.PREDECESSOR and not progress._forward_only:
                assert past == (row.states[j] != WAITING), f"{task} is ready when {before} is dispatched"
