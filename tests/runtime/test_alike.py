"""What must be alike in all processes: versions of packages, and programs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.programs.fingerprint import fingerprint
from rrfp_jax.runtime.run import alike
from rrfp_jax.train.alike import traced_programs
from tests.support import toy

HOSTS = ["n0", "n0", "n1", "n2"]


def world(*told, rank=0):
    return SimpleNamespace(rank=rank, hosts=HOSTS, size=len(told), gather=lambda what, own: list(told))


def programs(pipe=None, optimizer=None):
    trainer = rrfp.Trainer(
        pipe or toy.pipeline(),
        optimizer or optax.adam(1e-3),
        data=toy.microbatches(1),
        mesh=rrfp.Mesh(pp=2, share_devices=True),
    )
    return traced_programs(trainer._engine)


def test_who_computes_something_else_is_named_with_what():
    usual = {"layer 0": "a", "layer 1": "b", "the loss": "c"}
    odd = usual | {"layer 1": "x", "the loss": "y"}
    alike.check_programs(world(*[usual] * 4), usual)
    with pytest.raises(UsageError) as told:
        alike.check_programs(world(usual, usual, odd, usual), usual)
    assert str(told.value).startswith(
        "on rank 2 (n1) layer 1, the loss compute something else than on ranks 0, 1, 3 (n0, n2). Give all "
        "nodes the same code and packages"
    )


def test_other_versions_of_what_compiles_are_refused_and_of_what_traces_are_told(capsys):
    def learn(rank=0, **odd):
        own = {"jax": "0.10.2", "jaxlib": "0.10.2", "optax": "0.2.6"}
        told = [[host, own | (odd if host == "n2" else {})] for host in HOSTS]
        alike.learn_hosts(world(*told, rank=rank))
        return "".join(capsys.readouterr())

    assert learn() == ""
    told = "optax is 0.2.6 on ranks 0, 1, 2 (n0, n1), 0.3 on rank 3 (n2): training begins only if"
    assert told in learn(optax="0.3")
    assert learn(rank=1, optax="0.3") == ""
    with pytest.raises(UsageError, match=r"jaxlib is 0.10.2 on ranks 0, 1, 2 \(n0, n1\), 0.11.0 on rank 3"):
        learn(jaxlib="0.11.0")
    assert learn(**{"jax-cuda12-plugin": "0.10.2"}) == "", "a node without GPUs needs no plugin"


def test_hashes_are_of_what_is_computed():
    usual = programs()
    assert programs() == usual
    count = len(toy.pipeline())
    assert [*usual] == [*(f"layer {i}" for i in range(count)), "the loss", "the optimizer"]

    def differing(**given):
        found = programs(**given)
        return [name for name in usual if found[name] != usual[name]]

    assert differing(optimizer=optax.adam(1e-3, b1=0.8)) == ["the optimizer"]
    assert differing(pipe=toy.pipeline(loss=lambda x, mb: toy.loss(x * 2, mb))) == ["the loss"]

    def odd(params, carry, mb):
        return toy.block(jax.tree.map(jnp.sin, params), carry, mb)

    def odd_init(key):
        return jax.tree.map(jnp.sin, toy.block_init(key))

    def changed(layer):
        ends = [rrfp.layer(toy.embed, init=toy.embed_init), rrfp.layer(toy.head, init=toy.head_init)]
        block = rrfp.layer(toy.block, init=toy.block_init, repeat=toy.BLOCKS - 1)
        return rrfp.Pipeline([ends[0], layer, block, ends[1]], toy.loss)

    for layer in (rrfp.layer(odd, init=toy.block_init), rrfp.layer(toy.block, init=odd_init)):
        assert differing(pipe=changed(layer)) == ["layer 1"]


def test_values_that_a_program_holds_count_and_prints_and_addresses_do_not():
    def traced(table, prints=False):
        def function(x):
            if prints:
                jax.debug.print("{}", x.sum())
            return jax.nn.relu(x) + table

        return fingerprint(jax.make_jaxpr(function)(jnp.zeros(3)))

    usual = traced(np.ones(3, np.float32))
    assert traced(np.ones(3, np.float32)) == usual
    assert traced(np.ones(3, np.float32), prints=True) == usual
    assert traced(np.zeros(3, np.float32)) != usual
