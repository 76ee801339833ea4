"""Depth: equal layers are compiled once, whatever their number, and a task's scratch memory does not grow.

And how many layers a program has.
"""

import jax
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.runtime.programs.segments import segments_of
from tests.support import toy

STAGES = 2
FEW, MANY = 12, 24  # layers of a stage; in the order of their names ("10" before "9") no other is among them


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
    (trained,) = engine.library.all_programs("train")
    found = []
    for number, (chunk,) in trained.items():
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


def test_no_bit_depends_on_how_many_layers_a_program_has():
    """In float32: bfloat16 is rounded between programs, and not within."""
    alone, *others = [trained(3, layers_per_program=count) for count in (1, 2, 100)]
    calls = [len(own._engine.library.all_programs("train")[0][0][0].segments) for own in (alone, *others)]
    assert calls == [4, 2, 1]
    for other in others:
        assert jax.tree.all(jax.tree.map(np.array_equal, alone.stage_params, other.stage_params))
