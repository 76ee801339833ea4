"""The last layer's forward as part of its backward, where a schedule runs them back to back."""

import jax
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import FORWARD, INPUT
from tests.support import toy

DATA = toy.microbatches(4)


def counted(params, carry, mb):
    """A block with a term of its own in the loss, and a metric."""
    out = toy.block(params, carry, mb)
    return out, rrfp.Loss((out["x"] ** 2).sum() * 1e-3, metrics={"largest": rrfp.Max(out["x"].max())})


def trainer_of(seen=None, **settings):
    def loss(logits, mb):
        if seen is not None:
            jax.debug.callback(lambda x: seen.append(float(x)), logits.mean())
        return toy.loss(logits, mb)

    layers = [
        rrfp.layer(toy.embed, init=toy.embed_init),
        rrfp.layer(counted, init=toy.block_init, repeat=3),
        rrfp.layer(toy.head, init=toy.head_init),
    ]
    pipe, mesh = rrfp.Pipeline(layers, loss), rrfp.Mesh(pp=2)
    return toy.made(pipe, optax.adam(1e-3), data=DATA, mesh=mesh, **settings)


def last(trainer):
    (programs,) = trainer._engine.library.all_programs("train")
    (chunk,) = programs[1]
    return chunk


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("schedule", ["bf", "bfw"])
def test_losses_metrics_and_gradients_are_those_of_plain_jax(schedule, remat):
    seen = []
    trainer = trainer_of(seen, schedule=schedule, remat=remat)
    assert trainer.check().ok
    del seen[:]
    report = trainer.step(DATA)
    jax.effects_barrier()
    assert len(seen) == len(DATA), "the loss is computed once, with rematerialisation, too"
    apart = trainer_of(schedule=schedule, equal_schedules=True).step(DATA)
    assert report.loss == pytest.approx(apart.loss, rel=1e-5)
    assert report.metrics == pytest.approx(apart.metrics, rel=1e-5)
    assert report.metrics.keys() == {"accuracy", "largest"}, "of F's of other layers, and of the last B or I"


def test_nothing_of_the_last_layer_is_held_between_them():
    joined, apart = (last(started(schedule)) for schedule in ("bfw", "ranked:gpipe"))
    assert joined.segments[-1].lowered[FORWARD] is None
    assert apart.segments[-1].lowered[FORWARD] is not None
    logits = 4 * DATA[0]["labels"].size * toy.VOCABULARY
    less = apart.footprint.held_after_forward_bytes - joined.footprint.held_after_forward_bytes
    assert less >= logits
    assert joined.tasks[INPUT].statistics is not None


def started(schedule):
    trainer = trainer_of(schedule=schedule)
    trainer.step(DATA)
    return trainer


def test_limits_in_bytes_go_by_the_programs_of_the_schedule_that_there_is():
    trainer = trainer_of(schedule="gpipe", activation_budget="1MiB")
    for schedule in ("gpipe", "1f1b", "gpipe"):
        trainer.schedule = schedule
        trainer.step(DATA)
        assert trainer._engine.memory._ledgers[1].largest.chunks == [last(trainer).footprint]


def test_who_changes_to_another_schedule_and_back_compiles_once():
    trainer = started("1f1b")
    before = last(trainer)
    trainer.schedule = "gpipe"
    trainer.step(DATA)
    assert last(trainer).segments[-1] is not before.segments[-1]
    assert last(trainer).segments[0] is before.segments[0]
    trainer.schedule = "1f1b"
    assert trainer.step(DATA).compiled == 0
    assert last(trainer).segments[-1] is before.segments[-1]
    assert trainer.evaluate(DATA).loss > 0
