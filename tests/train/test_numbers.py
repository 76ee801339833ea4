"""Clipping, tied and frozen parameters, masks, loss scaling: training as plain JAX and optax do it."""

from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import BACKWARD, FORWARD
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.model.roles import leaf_paths
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages import step
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.runtime.transport.protocol import LocalTransport
from tests.support import toy

STEPS = 3
ONE, TWO, FOUR, LOOPED = rrfp.Mesh(pp=1), rrfp.Mesh(pp=2), rrfp.Mesh(pp=4), rrfp.Mesh(pp=2, chunks=2)
FROZEN = ["0.*", "1.*", "2.*", "5.bias"]


def pipeline(tied=False, **settings):
    return toy.tied_pipeline(**settings) if tied else toy.pipeline(**settings)


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def optimizer():
    return optax.adamw(1e-2, eps=1e-2, weight_decay=0.1, mask=is_matrix)


CASES = {
    "clipped, scaled": ({}, {"clip_norm": 0.3, "loss_scale": 1024.0}),
    "frozen": ({"frozen": FROZEN}, {"clip_norm": 0.3}),
    "all": ({"tied": True, "frozen": ["1.*", "3.up"]}, {"clip_norm": 0.3, "loss_scale": 2.0**-8}),
}
RUNS = [("clipped, scaled", TWO), ("frozen", TWO), ("all", FOUR), ("all", ONE), ("all", LOOPED)]


def plainly(params, batch, model, clip):
    """Train a function of {path: parameter}; the parameters after each step, losses and norms."""
    chain = optax.chain(optax.clip_by_global_norm(clip) if clip else optax.identity(), optimizer())
    state = chain.init(params)
    step = jax.jit(jax.value_and_grad(model))
    for number in range(STEPS):
        loss, gradient = step(params, batch(number))
        norms = [float(optax.tree.norm(tree)) for tree in (gradient, params)]
        changes, state = chain.update(gradient, state, params)
        params = optax.apply_updates(params, changes)
        yield params, float(loss), *norms


def toy_model(initial, tied, frozen):
    """The toy's mean loss as a function of the parameters that are trained, {path: parameter}."""
    paths, structure = leaf_paths(initial), jax.tree.structure(initial)
    every = dict(zip(paths, jax.tree.leaves(initial), strict=True))
    alias = {"7.table": "0.table"} if tied else {}
    trained = {
        p: v for p, v in every.items() if p not in alias and not any(fnmatchcase(p, f) for f in frozen)
    }

    def filled(values):
        known = {**every, **values}
        return jax.tree.unflatten(structure, [known[alias.get(path, path)] for path in paths])

    def model(values, whole):
        params = filled(values)
        carry = toy.embed(params["0"], None, whole)
        for i in range(1, toy.BLOCKS + 1):
            carry = toy.block(params[str(i)], carry, whole)
        last = toy.tied_head if tied else toy.head
        total, weight = toy.sums(last(params["7"], carry, whole), whole)
        return total / weight

    return trained, filled, model


def whole(number):
    """All microbatches of a step in one."""
    parts = toy.microbatches(seed=number)
    return {name: jnp.concatenate([jnp.asarray(mb[name]) for mb in parts]) for name in parts[0]}


def differs(case, mesh):
    """By how much training differs from plain JAX and optax; and the trainer."""
    settings, given = CASES[case]
    trainer = toy.trainer(pipe=pipeline(**settings), optimizer=optimizer(), mesh=mesh, **given)
    trainer.start()
    initial = jax.tree.map(jnp.asarray, jax.device_get(trainer.stage_params))
    trained, filled, model = toy_model(initial, "tied" in settings, settings.get("frozen", ()))
    errors = []
    schedules = ["bfw" if (case, mesh) == ("all", FOUR) else "bf", "fb" if mesh.chunks else "1f1b"] * STEPS
    expected = list(plainly(trained, whole, model, given.get("clip_norm")))
    for _, *numbers in expected:
        trainer.schedule = schedules.pop()
        report = next(trainer.steps(1))
        found = [report.loss, report.gradient_norm, report.parameter_norm]
        errors += [abs(a - b) / abs(b) for a, b in zip(found, numbers, strict=True)]
    pairs = zip(jax.tree.leaves(trainer.stage_params), jax.tree.leaves(filled(expected[-1][0])), strict=True)
    errors += [float(np.abs(np.asarray(a) - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in pairs]
    return max(errors), trainer, initial


@pytest.mark.parametrize(("case", "mesh"), RUNS, ids=str)
def test_training_is_that_of_plain_jax_and_optax(case, mesh):
    worst, trainer, initial = differs(case, mesh)
    assert worst <= 1e-5
    if "tied" in CASES[case][0]:
        assert np.array_equal(trainer.stage_params["0"]["table"], trainer.stage_params["7"]["table"])
    for path, before, after in zip(
        leaf_paths(initial), jax.tree.leaves(initial), jax.tree.leaves(trainer.stage_params), strict=True
    ):
        frozen = any(fnmatchcase(path, pattern) for pattern in CASES[case][0].get("frozen", ()))
        assert np.array_equal(before, after) == frozen, path


class TestBrokenVariantsAreCaught:
    """The comparison fails when one of these things is done wrong."""

    @pytest.mark.slow(reason="2 s: a mutant of tests/verification/bugs.md")
    def test_clipping_by_the_norm_of_each_stage(self, monkeypatch):
        norms = Stage.norms
        monkeypatch.setattr(Stage, "norms", lambda self: norms(self) * (self.index == 0))
        assert differs("clipped, scaled", FOUR)[0] > 1e-3

    @pytest.mark.slow(reason="3 s: a mutant of tests/verification/bugs.md")
    def test_a_tied_gradient_that_is_not_added(self, monkeypatch):
        monkeypatch.setattr(Stage, "add_aliases", lambda self, leaf, gradients: None)
        assert differs("all", FOUR)[0] > 1e-3

    @pytest.mark.slow(reason="2 s: a mutant of tests/verification/bugs.md")
    def test_a_tied_value_that_is_not_sent_back(self, monkeypatch):
        monkeypatch.setattr(Stage, "set_leaf", lambda self, leaf, value: None)
        assert differs("all", FOUR)[0] > 1e-3

    @pytest.mark.slow(reason="3 s: a mutant of tests/verification/bugs.md")
    def test_a_gradient_that_stays_scaled(self, monkeypatch):
        scale = Stage.scale_loss
        monkeypatch.setattr(Stage, "scale_loss", lambda self, value: scale(self, 1.0))
        assert differs("clipped, scaled", FOUR)[0] > 1e-3


@pytest.mark.parametrize("slope", [2.0, 1e37, 4e37, 2e38])
def test_the_largest_gradients_are_clipped(slope):
    """Inverses of the norm are not normal numbers, and XLA takes those for 0; a square is no float32."""
    layers = [rrfp.layer(lambda p, x, mb: mb["x"] * p["w"], init=lambda key: {"w": jnp.ones(4)})]
    pipe = rrfp.Pipeline(layers, lambda y, mb: rrfp.Loss(((y - 1) * slope).sum(), weight=y.size))
    batch = [{"x": np.ones(4, np.float32)}]
    trainer = toy.trainer(1, pipe=pipe, optimizer=optax.sgd(1.0), clip_norm=0.5, data=batch)
    report = trainer.step(batch)
    assert report.gradient_norm == pytest.approx(slope / 2)
    assert np.allclose(trainer.stage_params["0"]["w"], 0.75)


def test_squares_of_the_largest_numbers_do_not_overflow():
    found = step._norms([(0, (1e-300, 1.0, 1.0)), (1, (3e300, 1.0, 1.0)), (2, (4e300, 1.0, 2.0))])
    assert found.finite and found.gradient == pytest.approx(5e300) and found.squared_of_parameters == 4
    assert not step._norms([(0, (1e300, 1.0, 1.0)), (1, (float("inf"), 1.0, 1.0))]).finite
    assert not step._norms([(0, (1.7e308, 4.0, 1.0))]).finite


@pytest.fixture(scope="module")
def frozen():
    trainer = toy.trainer(4, pipe=toy.pipeline(frozen=FROZEN), data=toy.microbatches())
    trainer.start()
    return trainer


class TestFrozen:
    def test_nothing_is_computed_or_saved_below_the_first_trained_layer(self, frozen):
        (programs,) = frozen._engine.library.all_programs("train")
        for stage, works in enumerate([False, True, True, True]):  # layers 0-1, 2-3, 4-5, 6-7
            tasks = programs[stage][0].tasks
            assert (tasks[BACKWARD].program is not None) == works, stage
            assert (tasks[FORWARD].held_bytes > 0) == works, stage
        assert [programs[stage][0].tasks[BACKWARD].sends for stage in range(4)] == [0, 0, 1, 1]

    def test_it_has_neither_sums_nor_state(self, frozen):
        rows = frozen.start()
        layer = toy.WIDTH * 4 * toy.WIDTH + toy.WIDTH
        trained = [0, layer, 2 * layer - toy.WIDTH, layer + toy.WIDTH * toy.VOCABULARY]
        assert [row.accumulator_bytes for row in rows] == [4 * count for count in trained]
        counts = [0, 4, 4, 4]  # bytes of Adam's count of steps
        assert [row.optimizer_bytes for row in rows] == [
            8 * t + c for t, c in zip(trained, counts, strict=True)
        ]

    def test_gradients_leave_it_out_and_agree(self, frozen):
        gradient = frozen.value_and_grad(toy.microbatches())[1]
        assert sorted(gradient) == ["3", "4", "5", "6", "7"]
        assert sorted(gradient["5"]) == ["down", "up"]
        assert frozen.check().ok


@pytest.mark.slow(reason="several Trainers; make test keeps it for the mutants that it finds")
def test_aliases_in_other_chunks_and_in_the_same_one():
    tied = {"1.up": ["4.up", "-2.up"], "2.bias": "3.bias"}
    trainer = toy.trainer(mesh=LOOPED, pipe=toy.pipeline(tied=tied), loss_scale=4.0)
    assert trainer.check().ok
    list(trainer.steps(2))
    params = trainer.stage_params
    assert all(np.array_equal(params["1"]["up"], params[i]["up"]) for i in "46")
    assert np.array_equal(params["2"]["bias"], params["3"]["bias"])
    gradient = trainer.value_and_grad(toy.microbatches())[1]
    assert all(np.array_equal(gradient["1"]["up"], gradient[i]["up"]) for i in "46")


def test_initial_values_of_tied_parameters_are_asked_of_the_owner():
    asked = []

    def init(path, spec):
        asked.append(path)
        return np.full(spec.shape, 0.5, spec.dtype) if path == "0.table" else None

    params = toy.initial_params(toy.trainer(2, pipe=toy.tied_pipeline(), init=init))
    assert "7.table" not in asked
    assert (np.asarray(params["7"]["table"]) == 0.5).all()


def test_sums_of_bfloat16_gradients_agree_and_are_float32():
    def block(params, carry, mb):
        x, up, down = (leaf.astype(jnp.bfloat16) for leaf in (carry["x"], params["up"], params["down"]))
        x = x + jnp.tanh(x @ up) @ down + params["bias"].astype(jnp.bfloat16)
        return {"x": x, "positions": carry["positions"]}

    embed, _, head = toy.layers()
    layers = [embed, rrfp.layer(block, init=toy.block_init, repeat=2), head]
    trainer = toy.trainer(2, pipe=rrfp.Pipeline(layers, toy.loss))
    loss, gradient = trainer.value_and_grad(batch := toy.microbatches())
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}

    def sums(params, whole):
        carry = toy.embed(params["0"], None, whole)
        for i in "12":
            carry = block(params[i], carry, whole)
        return toy.sums(toy.head(params["3"], carry, whole), whole)

    params = jax.device_put(trainer.stage_params, jax.devices()[0])
    part = jax.jit(jax.value_and_grad(sums, has_aux=True))
    parts = [part(params, mb) for mb in batch]
    weight = sum(float(weight) for (_, weight), _ in parts)
    expected = jax.tree.map(lambda *g: sum(g) / weight, *[g for _, g in parts])
    assert loss == pytest.approx(sum(float(total) for (total, _), _ in parts) / weight, rel=1e-3)
    assert toy.worst_leaf(gradient, expected) <= 0.02  # of the order of bfloat16's rounding


@pytest.mark.slow(reason="4 s: two Trainers; runtime/test_adding.py has the sums")
def test_gradients_added_as_they_come_train_as_well():
    reference, arrival = (
        toy.trainer(4, accumulation=how, optimizer=optimizer()) for how in ("index", "arrival")
    )
    for a, b in zip(reference.steps(STEPS), arrival.steps(STEPS), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
    pairs = zip(jax.tree.leaves(reference.stage_params), jax.tree.leaves(arrival.stage_params), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


class TestExchange:
    """What `Driver.exchange` does when things go wrong."""

    def test_a_transfer_that_never_ends_is_named(self):
        class Losing(LocalTransport):
            def offer(self, key, arrays):
                pass

        with pytest.raises(rrfp.TrainingError, match="gives up waiting for tables to stage 1, since 0"):
            send(Losing, seconds=0.1)

    def test_what_it_waits_for_is_told_and_forgotten(self):
        world, told = World(), []

        class Telling(LocalTransport):
            def poll(self):
                told.extend(map(world.waits.words, world.waits.awaited()))
                return super().poll()

        assert float(*send(Telling, world)[1, 0]) == 3
        assert told[0].startswith("tables to stage 1, since") and not world.waits.awaited()


def send(transport, world=None, seconds=10.0):
    devices = {stage: (device,) for stage, device in enumerate(jax.devices()[:2])}
    sent = {(1, 0): [jax.device_put(3.0, *devices[0])]}
    driver = Driver(devices, world or World(), stall_seconds=seconds)
    driver.local = transport(devices)
    return driver.exchange("tables", sent, [(1, 0)])
