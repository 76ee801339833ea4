"""Depth: equal layers are compiled once, whatever their number, and a task's scratch memory does not grow.

And how many layers a program has.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import FORWARD
from rrfp_jax.runtime.programs.segments import segments_of
from tests.support import toy

STAGES = 2
FEW, MANY = 12, 24  # blocks a stage; sorted by their numbers' text, no other layer comes between them


def trained(blocks, **settings):
    """A Trainer of so many equal layers on each stage, after a step."""
    layers = [
        rrfp.layer(toy.embed, init=toy.embed_init),
        rrfp.layer(toy.block, init=toy.block_init, repeat=STAGES * blocks),
        rrfp.layer(toy.head, init=toy.head_init),
    ]
    pipe, data, mesh = rrfp.Pipeline(layers, toy.loss), toy.microbatches(2), rrfp.Mesh(pp=STAGES)
    trainer = toy.made(pipe, optax.adam(1e-3), data=data, mesh=mesh, **settings)
    trainer.step(data)
    return trainer


def programs_of(trainer):
    """By stage, what its programs cost, and the footprint of a microbatch."""
    engine = trainer._engine
    (compiled,) = engine.library.all_programs("train")
    found = []
    for number, (chunk,) in compiled.items():
        sums, optimizer = engine.stages[number]._programs, engine.optimizers[number]._programs
        made = [program for segment in chunk.segments for program in segment.lowered.values() if program]
        made += [program for own in (*sums.zeros, *sums.accumulate) for program in own.programs]
        made += [*sums.norms.programs, *optimizer.updates]
        found.append((sorted(map(costs, {id(one): one for one in made}.values())), chunk.footprint))
    return found


def costs(program):
    """Copies in its optimized HLO, and bytes."""
    sizes = program.memory_analysis()
    copies = program.as_text().count(" copy(")
    return copies, sizes.argument_size_in_bytes, sizes.output_size_in_bytes, sizes.temp_size_in_bytes


@pytest.mark.parametrize("schedule, remat", [("bf", "none"), ("bfw", "none"), ("bf", "full")])
def test_more_layers_need_no_other_programs_and_no_more_scratch_memory(schedule, remat):
    small, large = (programs_of(trained(blocks, schedule=schedule, remat=remat)) for blocks in (FEW, MANY))
    for (few, own), (many, deep) in zip(small, large, strict=True):
        assert few == many, "nothing in a program, such as a copy, grows with the number of layers"
        assert len(few) > 10
        assert deep.temporary_bytes == own.temporary_bytes and max(own.temporary_bytes.values()) > 0
        assert deep.held_after_forward_bytes > own.held_after_forward_bytes


def test_segments_begin_at_the_same_layers_wherever_stages_are_cut():
    assert segments_of(range(3, 9), 1, 4) == [range(3, 4), range(4, 8), range(8, 9)]
    assert segments_of(range(3, 9), 2, 4) == [range(3, 9)], "a stage of several devices is one"
    assert segments_of(range(3, 5), 1) == [range(3, 4), range(4, 5)]


def bound(layers_per_program, **settings):
    """Loss and gradient at given parameters of a model whose layers 9 and 10 are on one stage."""
    layers = [
        rrfp.layer(toy.embed, init=toy.embed_init),
        rrfp.layer(noisy, init=toy.block_init, repeat=12),
        rrfp.layer(toy.head, init=toy.head_init),
    ]
    pipe, settings = rrfp.Pipeline(layers, toy.loss), settings | {"layers_per_program": layers_per_program}
    return toy.made(pipe, optax.adam(1e-3), data=toy.microbatches(2), mesh=rrfp.Mesh(pp=2), **settings)


def noisy(params, carry, mb):
    """A block with dropout, and a loss of its own."""
    out = toy.block(params, carry, mb)
    kept = jax.random.bernoulli(mb.key, 0.9, out["x"].shape)
    return {**out, "x": out["x"] * kept}, rrfp.Loss(jnp.square(out["x"]).sum() * 1e-6)


@pytest.mark.parametrize(
    "settings",
    [{}, {"schedule": "bfw", "remat": "full"}, {"equal_schedules": True}],
    ids=["bf", "bfw", "halves"],
)
@pytest.mark.parametrize("count", [3, 8, 100])
def test_programs_of_several_layers_compute_the_same(count, settings):
    """To the bit here, in float32: each layer has the parameters, and the random keys, that it has alone."""
    found = []
    for layers in (1, count):
        trainer = bound(layers, **settings)
        trainer.step(toy.microbatches(2))
        found.append((trainer.value_and_grad(toy.microbatches(2))[1], trainer.stage_params))
    assert jax.tree.all(jax.tree.map(np.array_equal, *found))


def test_a_layer_that_only_prints_prints():
    seen = []

    def probe(carry, mb):
        jax.debug.callback(lambda x: seen.append(float(x)), carry["x"].mean())
        return carry

    layers = [
        rrfp.layer(toy.embed, init=toy.embed_init),
        rrfp.layer(probe),
        rrfp.layer(toy.head, init=toy.head_init),
    ]
    trainer = toy.made(rrfp.Pipeline(layers, toy.loss), optax.adam(1e-3), data=toy.microbatches(2))
    trainer.step(toy.microbatches(2))
    jax.effects_barrier()
    assert len(seen) == 2


def test_a_row_has_ended_when_all_its_programs_have():
    """Also one whose results nobody in the row reads: the last layer's, and the sum of terms of the loss."""
    layers = [
        rrfp.layer(toy.embed, init=toy.embed_init),
        rrfp.layer(noisy, init=toy.block_init, repeat=2),
        rrfp.layer(toy.block, init=toy.block_init, repeat=4),
        rrfp.layer(toy.head, init=toy.head_init),
    ]
    pipe, data, mesh = rrfp.Pipeline(layers, toy.loss), toy.microbatches(2), rrfp.Mesh(pp=2)
    trainer = toy.made(pipe, optax.adam(1e-3), data=data, mesh=mesh)
    trainer.step(data)
    (first,), _ = trainer._engine.library.all_programs("train")[0].values()
    row = first.tasks[FORWARD].program
    assert len(row.calls) == 5 and len(row.tokens) == 2
