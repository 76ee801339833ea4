"""Under JAX's own guards: what is allowed runs as ever, what cannot run is refused at once, by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.runtime.engine.engine import on_host
from tests.scripts import narrow_ranks
from tests.support import toy
from tests.train.test_processes import SCRIPTS, command

MESHES = {
    "stages": (rrfp.Mesh(pp=2), toy.pipeline),
    "chunks": (rrfp.Mesh(pp=2, chunks=2), toy.pipeline),
    "replicas": (rrfp.Mesh(pp=2, dp=2), toy.pipeline),
    "tied": (rrfp.Mesh(pp=2), toy.tied_pipeline),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
def test_transfers_that_nobody_asked_for_may_be_disallowed(case, tmp_path):
    mesh, pipe = MESHES[case]

    def losses():
        trainer = toy.trainer(mesh=mesh, pipe=pipe(), data=lambda step: toy.microbatches(4, seed=step))
        found = [report.loss for report in trainer.steps(2)]
        trainer.save(tmp_path / str(jax.config.jax_transfer_guard))
        trainer.restore(tmp_path / str(jax.config.jax_transfer_guard))
        gradient = trainer.value_and_grad(toy.microbatches(4))[1]
        trainer.check(), trainer.params()
        with jax.transfer_guard("allow"):
            norm = float(optax.tree.norm(jax.device_get(gradient)))
        return [*found, trainer.evaluate(toy.microbatches(4)).loss, norm]

    expected = losses()
    with jax.transfer_guard("disallow"):
        assert losses() == expected


def test_results_come_under_a_guard_also_where_they_must_be_copied():
    """Floats on a CPU are not: they are there already."""
    results = {"norm": jnp.arange(3, dtype=jnp.int4), "losses": [jnp.arange(2.0)]}
    with jax.transfer_guard("disallow"):
        found = on_host(results)
        with pytest.raises(RuntimeError, match="Disallowed device-to-host transfer"):
            np.asarray(jax.device_put(np.zeros(3, np.int8), jax.devices()[0]).astype(jnp.int4))
    assert found["norm"].tolist() == [0, 1, 2] and found["losses"][0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        (jax.disable_jit, r"jax_disable_jit=True: .*compiled before they run.*JAX_DISABLE_JIT"),
        (
            lambda: jax.transfer_guard("disallow_explicit"),
            "jax_transfer_guard='disallow_explicit'.*use 'disa",
        ),
        (
            lambda: jax.transfer_guard_host_to_device("disallow_explicit"),
            "jax_transfer_guard_host_to_device='disallow_explicit'",
        ),
    ],
)
def test_what_no_stage_could_run_under_is_refused_at_the_start(guard, said):
    with guard(), pytest.raises(rrfp.UsageError, match=said):
        toy.trainer(2)


def test_between_processes_too_and_numbers_of_few_bits_travel(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAX_TRANSFER_GUARD", "disallow")
    status, said = command(
        "rrfp_jax", "launch", "-n", 2, SCRIPTS / "narrow_ranks.py", folder=tmp_path, limit=100.0
    )
    assert status == 0, said
    narrow_ranks.main()
    between, alone = (_losses(text) for text in (said, capsys.readouterr().out))
    np.testing.assert_allclose(between, alone, rtol=1e-5)


def _losses(said):
    return json.loads(next(line for line in said.splitlines() if "losses" in line).partition("losses ")[2])
