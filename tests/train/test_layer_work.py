"""What layers have to do, as a Trainer's reports and its trace know it."""

import jax.numpy as jnp
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.report.run_folder import read_run

WIDTH, ROWS = 16, 8


def embed(weight, x, mb):
    return mb["x"] @ weight


def block(weight, x, mb):
    return jnp.tanh(x @ weight)


def plain_loss(x, mb):
    return rrfp.Loss(x.sum(), weight=x.shape[0])


def heavy_loss(x, mb):
    for _ in range(20):
        x = jnp.tanh(x @ (jnp.eye(WIDTH) * 0.5))
    return rrfp.Loss(x.sum(), weight=x.shape[0])


def trained(loss):
    layers = [
        rrfp.layer(embed, init=lambda key: jnp.eye(WIDTH)),
        rrfp.layer(block, init=lambda key: jnp.eye(WIDTH), repeat=4),
    ]
    trainer = rrfp.Trainer(rrfp.Pipeline(layers, loss), optax.sgd(1e-2), mesh=rrfp.Mesh(pp=2), split=(2, 3))
    return trainer, trainer.step([{"x": jnp.ones((ROWS, WIDTH))}] * 4)


def test_layers_by_name_with_what_they_take_and_hold():
    _, report = trained(plain_loss)
    work = report.recorded.work()
    assert [layer.name for layer in work.layers] == ["embed", *["block"] * 4]
    assert work.split == [2, 3] and work.measure == "block"
    blocks = [layer.estimate for layer in work.layers[1:]]
    assert blocks[:3] == [blocks[0]] * 3 and blocks[3] == pytest.approx(blocks[0], rel=0.05)
    assert work.layers[1].held_bytes > 0
    assert report.recorded.work() is work, "it is found out once"


def test_a_last_layer_with_a_loss_that_counts_is_another_kind():
    _, report = trained(heavy_loss)
    layers = report.recorded.work().layers
    assert layers[-1].name == "block and loss" and layers[-1].estimate > 2 * layers[-2].estimate


def test_a_trace_has_it(tmp_path):
    trainer, report = trained(plain_loss)
    trainer.write_trace(tmp_path / "steps.msgpack")
    (step,) = read_run(tmp_path / "steps.msgpack").steps
    assert step.recorded.work() == report.recorded.work()


def test_a_model_that_cannot_be_analysed_trains_all_the_same(monkeypatch, tmp_path):
    def fails(*arguments, **more):
        raise NotImplementedError("no rule for this operation")

    monkeypatch.setattr("rrfp_jax.forecast.costs.layer_costs", fails)
    trainer, report = trained(plain_loss)
    assert report.recorded.work() is None and report.explain().sentence
    trainer.write_trace(tmp_path / "steps.msgpack")
    assert read_run(tmp_path / "steps.msgpack").steps[0].recorded.work() is None
