"""Stages of several devices and several replicas, all in one process."""

import functools

import chex
import jax
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.run.world import World
from tests.support import toy
from tests.support.sharded import data, leaves, pipeline, trainer, whole

SIZES = [(1, 2, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2), (2, 2, 2), (1, 4, 1), (1, 1, 4)]

UNEVEN = [(2, (2, 1), 1), (3, (1, 2, 4), 1), (3, (4, 2, 1), 1), (2, (1, 2), 2)]
"""Stages with different numbers of devices."""


@pytest.fixture(scope="module")
def trained():
    """Trainers after five steps, with their reports, by (pp, tp, dp); each is compiled once."""

    @functools.cache
    def trained(pp, tp, dp):
        own = trainer(pp, tp, dp)
        return own, list(own.steps(5))

    return trained


@pytest.mark.parametrize(("pp", "tp", "dp"), [*SIZES, *UNEVEN])
def test_gradients_are_those_of_plain_jax(pp, tp, dp, trained):
    batch = toy.microbatches(8)
    own, _ = trained(pp, tp, dp)
    expected, reference = toy.reference(whole(own.stage_params), batch)
    for schedule in ("bf", "bfw"):
        own.schedule = schedule
        loss, gradient = own.value_and_grad(batch)
        assert loss == pytest.approx(float(expected), rel=1e-6)
        assert toy.worst_leaf(whole(gradient), reference) <= 1e-5


@pytest.mark.slow(reason="5 s: two Trainers; test_agreement.py trains with tp, test_sharded_state.py with dp")
@pytest.mark.parametrize(("pp", "tp", "dp"), [*SIZES, *UNEVEN])
def test_training_is_that_of_one_device(pp, tp, dp, trained):
    one, reports = trained(1, 1, 1)
    several, own = trained(pp, tp, dp)
    for a, b in zip(reports, own, strict=True):
        assert (b.loss, b.gradient_norm) == pytest.approx((a.loss, a.gradient_norm), rel=1e-5)
        assert b.parameter_norm == pytest.approx(a.parameter_norm, rel=1e-6)
    assert toy.worst_leaf(whole(several.stage_params), whole(one.stage_params)) <= 1e-4


@pytest.mark.slow(reason="3 s: a Trainer of its own")
@pytest.mark.parametrize(("pp", "tp", "dp"), [(4, 1, 1), (2, 2, 2)])
def test_a_trace_has_how_busy_every_replica_was(pp, tp, dp, trained):
    trace = trained(pp, tp, dp)[1][-1].trace
    assert [len(row) for row in trace.busy_by_replica] == ([pp] * dp if dp > 1 else [])
    if dp > 1:
        assert min(min(row) for row in trace.busy_by_replica) > 0
        shown = [sum(r.end - r.start for r in trace.stage_records(stage)) for stage in range(pp)]
        assert trace.busy_by_replica[trace.replica] == pytest.approx(shown)


def test_parameters_gradients_and_state_are_spread(trained):
    own, _ = trained(2, 2, 1)
    up = own.stage_params["1"]["up"]
    assert up.addressable_shards[0].data.shape == (up.shape[0], up.shape[1] // 2)
    _, gradient = own.value_and_grad(toy.microbatches(8))
    assert gradient["1"]["up"].sharding.spec == P(None, "tp")
    state = own._engine.optimizers[0].state
    moments = [leaf for leaf in state if leaf.shape == up.shape]
    assert moments and all(leaf.sharding == up.sharding for leaf in moments)
    half = own.start()[0].weight_bytes
    assert half < 0.6 * trainer(2, 1).start()[0].weight_bytes


@pytest.mark.slow(reason="4 s: two Trainers")
def test_a_carry_that_is_spread_is_sent_in_parts():
    """Sequences between the stages: each device sends its own half."""
    batch, sent = toy.microbatches(8), {}
    for carry in (P(), P(None, "tp")):
        own = trainer(2, 2, pipe=pipeline(carry=carry))
        ledger = own.start()[0]
        sent[carry] = ledger.largest.chunks[0].activation_out_bytes
        _, gradient = own.value_and_grad(batch)
        _, reference = toy.reference(whole(own.stage_params), batch)
        assert toy.worst_leaf(whole(gradient), reference) <= 1e-5
    assert sent[P(None, "tp")] < 0.7 * sent[P()]


@pytest.mark.slow(reason="two Trainers")
def test_between_stages_that_differ_the_carry_is_whole():
    """One copy is sent for all devices of a process; within the stages it is spread as asked for."""
    spread = pipeline(carry=P(None, "tp"))
    even, uneven = (trainer(2, tp, pipe=spread).start() for tp in (2, (2, 1)))
    assert uneven[0].largest.chunks[0].activation_out_bytes > even[0].largest.chunks[0].activation_out_bytes
    own = trainer(4, (2, 2, 1, 1), pipe=spread)
    _, gradient = own.value_and_grad(toy.microbatches(8))
    _, reference = toy.reference(whole(own.stage_params), toy.microbatches(8))
    assert toy.worst_leaf(whole(gradient), reference) <= 1e-5
    first, second = (ledger.largest.chunks[0].activation_out_bytes for ledger in own.start()[:2])
    assert first < second


@pytest.mark.slow(reason="5 s: three programs a stage")
@pytest.mark.parametrize("shape", ["looped", "v"])
def test_stages_that_differ_may_have_several_chunks_frozen_parameters_and_budgets(shape):
    sizes = {"chunks": 2, "shape": shape}
    frozen = pipeline(frozen=["0.*", "1.*"])
    one, several = (
        toy.trainer(mesh=rrfp.Mesh(pp=2, tp=tp, **sizes), pipe=frozen, schedule="bfw", data=data, **budget)
        for tp, budget in ((1, {}), ((2, 1), {"activation_budget": "1MiB"}))
    )
    for a, b in zip(one.steps(2), several.steps(2), strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
    batch = toy.microbatches(8, seed=9)
    assert several.evaluate(batch).loss == pytest.approx(one.evaluate(batch).loss, rel=1e-5)


@pytest.mark.slow(reason="2 s: a Trainer of its own")
def test_what_lies_on_other_stages_need_not_be_divisible():
    """The head's 16 rows cannot be shared by three devices, but those of the first stage are only two."""
    own = trainer(2, (3, 1), pipe=toy.pipeline(sharding={"-1.out": P("tp", None)}))
    assert own.start()
    with pytest.raises(rrfp.UsageError, match=r"parameter 7\.out.* by tp=3 devices"):
        trainer(2, (1, 3), pipe=toy.pipeline(sharding={"-1.out": P("tp", None)}))


@pytest.mark.slow(reason="4 s: two Trainers")
def test_stages_that_share_any_device_take_turns():
    own = trainer(3, (1, 2, 4), data=None)
    own.step(toy.microbatches(4))
    assert [sorted(stages) for stages in own._engine.driver._sharing] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("tp", "places"),
    [
        ((2, 1), [[0, 1], [2]]),
        ((1, 2), [[0], [1, 2]]),
        ((1, 2, 1), [[0], [1, 2], [3]]),
        ((2, 1, 1), [[0, 1], [2], [3]]),
    ],
)
def test_every_stage_has_devices_of_its_own(tp, places):
    stage_meshes = rrfp.Mesh(pp=len(tp), tp=tp).lay_out(World()).stage_meshes
    assert [[device.id for device in stage_mesh.devices] for stage_mesh in stage_meshes.values()] == places


@pytest.mark.slow(reason="4 s: two Trainers")
@pytest.mark.parametrize("pattern", ["0.table", "-1.table"])
def test_a_tied_parameter_is_spread_by_any_of_its_names(pattern):
    own = trainer(2, 2, pipe=toy.tied_pipeline(sharding={pattern: P(None, "tp")}))
    own.start()
    tables = [layer["table"] for layer in own.stage_params.values() if "table" in layer]
    assert [table.sharding.spec for table in tables] == [P(None, "tp")] * 2


@pytest.mark.slow(reason="5 s: two Trainers")
def test_whole_tied_parameters_go_between_stages_that_differ():
    one, several = (trainer(2, tp, pipe=toy.tied_pipeline()) for tp in (1, (2, 1)))
    for a, b in zip(one.steps(3), several.steps(3), strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
    spread = toy.tied_pipeline(sharding={"*.table": P(None, "tp")})
    with pytest.raises(rrfp.UsageError, match=r"0\.table is tied between stages of 2 and 1 devices.*whole"):
        trainer(2, (2, 1), pipe=spread).start()


def test_replicas_share_the_microbatches_and_end_with_equal_parameters(trained):
    stages = trained(2, 1, 2)[0]._engine.stages
    for stage_replica in (0, 1):
        chex.assert_trees_all_equal(stages[stage_replica].leaves[0], stages[stage_replica + 2].leaves[0])


@pytest.mark.slow(reason="6 s: two Trainers; between processes, test_agreement.py")
def test_results_are_equal_to_the_bit_from_run_to_run():
    def run(seed):
        own = trainer(2, 2, 2, delays=Delays(skew=0.01, jitter="J2", seed=seed))
        losses = [report.loss for report in own.steps(3)]
        orders = [step.trace.order(stage) for step in own._stepper.recorded for stage in range(2)]
        return orders, losses, [leaf.tobytes() for leaf in leaves(own)]

    (orders, *one), (others, *two) = run(1), run(2)
    assert orders != others and one == two


class Attention(nnx.Module):
    """Annotated as in flax's guide, with a constraint inside."""

    def __init__(self, rngs):
        spread = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(16, 32, rngs=rngs, kernel_init=nnx.with_partitioning(spread, (None, "tp")))
        self.down = nnx.Linear(32, 16, rngs=rngs, kernel_init=nnx.with_partitioning(spread, ("tp", None)))

    def __call__(self, carry, mb):
        x = jax.lax.with_sharding_constraint(carry["x"], P(None, "tp", None))
        return {**carry, "x": x + self.down(nnx.gelu(self.up(x)))}


class Foreign(nnx.Module):
    """Written for a mesh with other axes."""

    def __init__(self, rngs):
        spread = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", ("tp", "expert")))
        self.up = nnx.Linear(16, 16, rngs=rngs, kernel_init=spread)

    def __call__(self, carry, mb):
        return {**carry, "x": carry["x"] + self.up(carry["x"])}


class LinenBlock(linen.Module):
    axes: tuple = (None, "tp")

    @linen.compact
    def __call__(self, carry, mb):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), self.axes)
        return {**carry, "x": carry["x"] + linen.Dense(16, kernel_init=init)(carry["x"])}


@pytest.mark.slow(reason="4 s: two Trainers")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("block", [Attention, LinenBlock(), Foreign, LinenBlock(("fsdp", "tp"))])
def test_metadata_of_flax_modules_counts(block, tp):
    first, *_, last = toy.layers()
    pipe = rrfp.Pipeline([first, rrfp.layer(block, repeat=2), last], toy.loss)
    own = trainer(2, tp, pipe=pipe)
    kernels = [leaf for leaf in jax.tree.leaves((own.start(), own.stage_params)[1]["1"]) if leaf.ndim == 2]
    assert all(np.prod(k.addressable_shards[0].data.shape) * tp == k.size for k in kernels)
    assert own.check().ok


@pytest.mark.slow(reason="two Trainers")
def test_tied_and_frozen_parameters_clipping_and_evaluation():
    reports = []
    for sizes in ((1, 1, 1), (2, 2, 1), (2, 2, 2)):
        pipe = toy.tied_pipeline(frozen="2.*", sharding={"*.table": P(None, "tp"), "*.up": P(None, "tp")})
        own = trainer(*sizes, pipe=pipe, clip_norm=0.1)
        losses = [report.loss for report in own.steps(4)]
        reports.append([*losses, own.evaluate(lambda step: toy.microbatches(8, seed=99)).loss])
    assert reports[1] == pytest.approx(reports[0], rel=1e-5)
    assert reports[2] == pytest.approx(reports[0], rel=1e-5)


@pytest.mark.parametrize(
    ("sharding", "said"),
    [
        ({"*.nothing": P("tp")}, r"'\*.nothing'.* matches no parameter; there are 0.table"),
        (
            {"*.up": P("mlp")},
            r"parameter 1.up, float32\[16, 32\]: .* the axis 'mlp'; stages have one, 'tp'",
        ),
        (
            {"0.table": P("tp")},
            r"parameter 0.table, float32\[13, 16\]: dimension 0 .* tp=2 devices",
        ),
        ({"*.bias": P(None, "tp")}, r"parameter 1.bias, float32\[16\]: .* has more dimensions than it"),
    ],
)
def test_what_cannot_be_is_refused(sharding, said):
    with pytest.raises(rrfp.UsageError, match=said):
        trainer(1, 2, pipe=toy.pipeline(sharding=sharding)).start()


def test_a_carry_that_cannot_be_shared_is_refused():
    with pytest.raises(rrfp.UsageError, match=r"carry=.*float32\[2, 8, 16\]: dimension 1 .* tp=3"):
        trainer(2, 3, pipe=toy.pipeline(carry=P(None, "tp"))).start()


def test_microbatches_that_replicas_cannot_share_are_refused():
    with pytest.raises(rrfp.UsageError, match="7 microbatches for dp=2 replicas"):
        trainer(1, 1, 2).step(toy.microbatches(7))


def test_a_spec_that_is_none_is_refused():
    with pytest.raises(rrfp.UsageError, match=r"'tp' is no jax\.sharding\.PartitionSpec"):
        toy.pipeline(sharding={"*.up": "tp"})


def test_one_stage_needs_different_devices():
    with pytest.raises(rrfp.UsageError, match="needs 8 different ones, and this process has 4"):
        rrfp.Mesh(tp=8, share_devices=True).lay_out(World())


def test_planned_orders_and_predicted_splits_know_no_replicas():
    with pytest.raises(rrfp.UsageError, match="a planned order with dp=2"):
        trainer(1, 1, 2, "planned")
    with pytest.raises(rrfp.UsageError, match="split='auto' with tp=2, dp=1"):
        trainer(2, 2, 1, split="auto")


PLACEMENTS = [(4, 2, "looped"), (2, 4, "looped"), (4, 2, "v"), (2, 3, "v"), (1, 3, "looped")]


def chunked(stages, chunks, shape, **kwargs):
    return toy.trainer(mesh=rrfp.Mesh(pp=stages, chunks=chunks, shape=shape), **kwargs)


@pytest.mark.slow(reason="2 s: two Trainers")
@pytest.mark.parametrize(("stages", "chunks", "shape"), PLACEMENTS)
def test_gradients_of_chunks_are_those_of_the_whole_batch(stages, chunks, shape):
    own, batch = chunked(stages, chunks, shape), toy.microbatches(2 * stages)
    loss, gradient = own.value_and_grad(batch)
    expected_loss, expected = toy.reference(own.stage_params, batch)
    assert abs(loss - float(expected_loss)) <= 1e-6 * abs(float(expected_loss))
    assert toy.worst_leaf(gradient, expected) <= 1e-5


@pytest.mark.slow(reason="2 s: two Trainers; train/test_parity.py has splits")
def test_initial_values_do_not_depend_on_the_placement():
    one, other = chunked(1, 1, "looped"), chunked(4, 2, "v")
    one.start()
    other.start()
    chex.assert_trees_all_equal(one.stage_params, other.stage_params)


@pytest.mark.parametrize("training", [True, False])
def test_a_loss_may_name_axes_of_the_mesh(training):
    def loss(x, mb):
        if mb.training == training:
            x = jax.lax.with_sharding_constraint(x, P(None, "tp"))
        return rrfp.Loss(x.sum(), weight=x.size)

    pipe = rrfp.Pipeline(
        [rrfp.layer(lambda p, x, mb: mb["x"] * p, init=lambda key: np.ones((), np.float32))], loss
    )
    batch = [{"x": np.ones((2, 4), np.float32)}]
    own = toy.trainer(pipe=pipe, mesh=rrfp.Mesh(pp=1, tp=2), data=batch)
    assert own.evaluate(batch).loss == next(own.steps(1)).loss == 1


def test_a_layer_whose_residuals_are_its_parameters_is_checked():
    layers = [
        rrfp.layer(lambda _, mb: mb["x"]),
        rrfp.layer(lambda w, x, mb: jax.numpy.tanh(x @ w), init=lambda key: jax.random.normal(key, (4, 4))),
    ]
    pipe = rrfp.Pipeline(layers, lambda x, mb: rrfp.Loss((x**2).sum(), weight=x.size))
    batch = [{"x": np.ones((2, 4), np.float32)}]
    assert toy.trainer(pipe=pipe, mesh=rrfp.Mesh(pp=1, tp=2), data=batch).check().ok
