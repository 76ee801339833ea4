"""Parameters and optimizer state of stages of several devices: spread, shared, saved and resumed."""

import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from tests.support import toy
from tests.support.sharded import leaves, pipeline, trainer


@pytest.mark.slow(reason="two Trainers")
def test_optimizer_state_that_is_no_tree_of_parameters_is_whole():
    def losses(tp):
        optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)
        return [report.loss for report in trainer(1, tp, optimizer=optimizer).steps(3)]

    assert losses(2) == pytest.approx(losses(1), rel=1e-5)


LAYOUTS = [(1, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (2, (2, 1), 1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of three steps by two stages of two devices in two replicas, with what came of five."""
    folder = tmp_path_factory.mktemp("saved")
    own = trainer(2, 2, 2)
    losses = [report.loss for report in own.steps(3)]
    own.save(folder)
    return folder, losses + [report.loss for report in own.steps(2)], leaves(own)


@pytest.mark.slow(reason="9 s: two Trainers; the test of its parts resumes on one device")
@pytest.mark.parametrize(("pp", "tp", "dp"), LAYOUTS)
def test_checkpoints_resume_with_other_numbers_of_stages_devices_and_replicas(saved, pp, tp, dp):
    folder, losses, params = saved
    own = trainer(pp, tp, dp)
    assert own.restore(folder)
    assert [report.loss for report in own.steps(2)] == pytest.approx(losses[3:], rel=1e-5)
    for a, b in zip(leaves(own), params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow(reason="4 s; TestOrbax has orbax, test_sharding.py spread tensors")
def test_a_checkpoint_of_spread_tensors_is_in_parts_that_plain_orbax_reads(saved):
    import orbax.checkpoint as ocp

    folder, _, _ = saved
    files = [file.name for file in (folder / "3" / "params.1.up").iterdir()]
    assert sorted(files) == ["0.0", "0.1", "zarr.json"]
    found = ocp.StandardCheckpointer().restore(folder / "3")
    own = trainer(1, 1, 1)
    own.restore(folder)
    np.testing.assert_array_equal(found["params"]["1"]["up"], own.stage_params["1"]["up"])


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_replicas_may_share_the_state_of_the_optimizer(pp, tp):
    def run(share):
        own = toy.trainer(
            mesh=rrfp.Mesh(pp=pp, tp=tp, dp=2, shard_optimizer=share),
            pipe=pipeline(),
            data=lambda step: toy.microbatches(8, seed=step),
            clip_norm=0.5,
        )
        return own, [report.loss for report in own.steps(4)], own.start()[0].optimizer_bytes

    (own, losses, half), (other, expected, full) = run(True), run(False)
    assert losses == pytest.approx(expected, rel=1e-6)
    for a, b in zip(leaves(own), leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert half < 0.6 * full


@pytest.mark.slow(reason="10 s: four Trainers")
def test_shared_state_is_saved_and_resumed_elsewhere(tmp_path):
    def made(**kwargs):
        mesh = rrfp.Mesh(**kwargs)
        data = lambda step: toy.microbatches(8, seed=step)  # noqa: E731
        return toy.trainer(mesh=mesh, pipe=pipeline(), data=data)

    own = made(pp=1, tp=2, dp=2, shard_optimizer=True)
    list(own.steps(2))
    own.save(tmp_path)
    expected = [report.loss for report in own.steps(2)]
    for kwargs in ({"pp": 2}, {"pp": 2, "dp": 2}, {"dp": 4, "shard_optimizer": True}):
        again = made(**kwargs)
        again.restore(tmp_path)
        assert [report.loss for report in again.steps(2)] == pytest.approx(expected, rel=1e-5)
