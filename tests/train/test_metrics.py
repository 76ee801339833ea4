"""What reports say besides the loss: metrics by their reductions, and injected hyperparameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.step import Reduced, figures
from rrfp_jax.train.report import Evaluation

ROWS, WIDTH = 4, 6


def widened(params, carry, mb):
    """The first layer has metrics of its own, one of them that of the loss, too."""
    x = params["w"] * mb["x"]
    return x, rrfp.Loss(0.0 * x.sum(), metrics={"rows": rrfp.Sum(x.shape[0]), "top": rrfp.Max(mb["x"].max())})


def scaled(params, carry, mb):
    return params["w"] * carry


def loss(carry, mb):
    x, mask = mb["x"], mb["mask"]
    return rrfp.Loss(
        (carry**2).sum(),
        weight=carry.shape[0],
        metrics={
            "plain": x.sum(),
            "rows": rrfp.Sum(x.shape[0]),
            "top": rrfp.Max(2 * x.max()),
            "own": rrfp.Mean((x * mask).sum(), mask.sum()),
            "none": rrfp.Mean(x.sum(), 0),
        },
    )


def pipeline(loss=loss, **kwargs):
    def init(key):
        return {"w": jnp.ones(WIDTH)}

    return rrfp.Pipeline([rrfp.layer(widened, init=init), rrfp.layer(scaled, init=init)], loss, **kwargs)


def microbatches(step, count=6):
    random = np.random.default_rng(step)
    for _ in range(count):
        x = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
        yield {"x": x, "mask": (random.random(x.shape) < 0.3).astype(np.float32)}


def expected(steps):
    """The metrics of steps 0 to `steps` - 1, in one."""
    batch = [mb for step in range(steps) for mb in microbatches(step)]
    x, mask = (np.stack([mb[name] for mb in batch]).astype(np.float64) for name in ("x", "mask"))
    return {
        "plain": x.sum() / (ROWS * len(batch)),
        "rows": 2 * ROWS * len(batch),
        "top": 2 * x.max(),
        "own": (x * mask).sum() / mask.sum(),
        "none": math.nan,
    }


@pytest.fixture(scope="module")
def found():
    """By mesh and schedule, the metrics of a step, and of an evaluation of two."""
    meshes = {
        "one": rrfp.Mesh(),
        "pp": rrfp.Mesh(pp=2),
        "pp-dp": rrfp.Mesh(pp=2, dp=2),
        "pp-tp": rrfp.Mesh(pp=2, tp=2),
    }
    metrics = {}
    for name, mesh in meshes.items():
        pipe = pipeline(sharding={"*.w": P("tp")} if mesh.tp == 2 else {})
        trainer = rrfp.Trainer(pipe, data=microbatches, mesh=mesh)
        assert trainer.check().ok
        for schedule in ("bf", "gpipe"):
            trainer.schedule = schedule
            stepper = trainer._stepper
            sums = stepper.run("train", trainer._data, 0).sums
            metrics[name, schedule] = figures(sums.metrics, sums.weight)
        metrics[name, "evaluate"] = trainer.evaluate(microbatches, steps=2).metrics
    return metrics


def test_metrics_are_reduced_as_they_ask(found):
    for (_, how), metrics in found.items():
        steps = 2 if how == "evaluate" else 1
        assert metrics == pytest.approx(expected(steps), rel=1e-5, nan_ok=True)


def test_no_order_of_tasks_and_no_mesh_changes_a_bit(found):
    for mesh in ("one", "pp", "pp-dp", "pp-tp"):
        assert repr(found[mesh, "bf"]) == repr(found[mesh, "gpipe"]) == repr(found["one", "bf"])
        assert repr(found[mesh, "evaluate"]) == repr(found["one", "evaluate"])


def test_what_is_no_number_stays_so_in_any_order():
    parts = [Reduced("max", [value]) for value in (1.0, math.nan, 2.0)]
    assert all(math.isnan((a + b + c).figure(1.0)) for a, b, c in (parts, parts[::-1]))


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ({"top": rrfp.Sum(1.0)}, "Loss metric 'top' is reduced as 'max' by one part .* 'sum' by another"),
        ({"own": rrfp.Mean(jnp.ones(2), 1.0)}, r"Loss own.total has shape \(2,\)"),
        ({"own": rrfp.Mean(1.0, 1j)}, "Loss own.weight is complex"),
        ({"own": rrfp.Max("1")}, "Loss own.value is '1'"),
        ({"validation_x": rrfp.Sum(1.0)}, "Loss metric 'validation_x': reports use that name"),
        ({"hyperparams": rrfp.Sum(1.0)}, "Loss metric 'hyperparams': reports use that name"),
    ],
)
@pytest.mark.usefixtures("nothing_compiles")
def test_metrics_that_cannot_be(metric, said):
    def wrong(carry, mb):
        return rrfp.Loss(carry.sum(), weight=carry.shape[0], metrics=metric)

    with pytest.raises(rrfp.UsageError, match=said):
        rrfp.Trainer(pipeline(wrong), data=microbatches)


def rate(step):
    return 0.01 / (1 + step)


def labels(params):
    return {layer: jax.tree.map(lambda _, own=layer: own, tree) for layer, tree in params.items()}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.sgd(0.1), lambda step: {}),
        (
            optax.chain(optax.identity(), optax.inject_hyperparams(optax.sgd)(rate, momentum=0.5)),
            lambda step: {"learning_rate": rate(step), "momentum": 0.5},
        ),
        (
            optax.multi_transform(
                {
                    "0": optax.inject_hyperparams(optax.sgd)(rate),
                    "1": optax.inject_hyperparams(optax.sgd)(0.25),
                },
                labels,
            ),
            lambda step: {"0.learning_rate": rate(step), "1.learning_rate": 0.25},
        ),
    ],
    ids=["none", "one", "several"],
)
def test_hyperparameters_are_those_of_the_update(optimizer, expected):
    trainer = rrfp.Trainer(pipeline(frozen="0.*"), optimizer, data=microbatches, mesh=rrfp.Mesh(pp=2))
    if "0.learning_rate" in expected(0):
        trainer = rrfp.Trainer(pipeline(), optimizer, data=microbatches, mesh=rrfp.Mesh(pp=2))
    for report in trainer.steps(2):
        assert report.hyperparams == pytest.approx(expected(report.step))
        assert report.as_dict().get("hyperparams", {}) == report.hyperparams
        rates = [value for name, value in expected(report.step).items() if name.endswith("learning_rate")]
        shown = f"  lr {' '.join(f'{value:.2e}' for value in rates)}  norm"
        assert shown in str(report) or not rates


def test_a_number_that_a_checkpoint_keeps_is_said_once(tmp_path, capfd, monkeypatch):
    """Whoever asks for another one hears that it does not count; a schedule's is asked anew."""
    gather = World.gather

    def of_two_replicas(self, what, *own):
        return gather(self, what, *own) * (2 if what == "the optimizer's restored numbers" else 1)

    monkeypatch.setattr(World, "gather", of_two_replicas)

    def made(rate, **numbers):
        optimizer = optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(rate), **numbers)
        return rrfp.Trainer(pipeline(), optimizer, data=microbatches, mesh=rrfp.Mesh(pp=2))

    first = made(0.25, momentum=0.5)
    list(first.steps(1))
    first.save(tmp_path)
    capfd.readouterr()
    assert made(0.25, momentum=0.5).restore(tmp_path) and capfd.readouterr().out == ""
    other = made(0.125, momentum=0.75)
    assert other.restore(tmp_path)
    assert capfd.readouterr().out == (
        "momentum stays 0.5, as the checkpoint has it in the optimizer's state; 0.75 was asked for. "
        "Only what is a schedule from a run's beginning on can be changed: "
        "momentum=optax.constant_schedule(0.75)\n"
    )
    (report,) = other.steps(1)
    assert report.hyperparams == {"learning_rate": 0.125, "momentum": 0.5}


def test_an_evaluation_prints_as_one_line():
    found = Evaluation(loss=0.52984, weight=1256.0, metrics={"accuracy": 0.951})
    assert str(found) == "loss 0.5298  accuracy 0.9510  over a weight of 1,256"
