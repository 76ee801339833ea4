"""Which GPUs each rank of a machine gets."""

import pytest

from rrfp_jax.runtime.run.place import MEMORY, OLD_MEMORY, gpu_environment


@pytest.fixture
def machine(tmp_path):
    """The environments of all ranks on a machine with that many GPUs."""

    def environments(gpus, count, **environment):
        for i in range(gpus):
            (tmp_path / f"0000:0{i}:00.0").mkdir(exist_ok=True)
        return [gpu_environment(environment, rank, count, tmp_path) for rank in range(count)]

    return environments


def visible(environments):
    return [env["CUDA_VISIBLE_DEVICES"] for env in environments]


def test_one_each(machine):
    assert visible(machine(4, 4)) == ["0", "1", "2", "3"]


def test_several_each(machine):
    assert visible(machine(8, 2)) == ["0,1,2,3", "4,5,6,7"]


def test_shared_with_its_memory(machine):
    found = machine(1, 4)
    assert visible(found) == ["0"] * 4
    assert {env[MEMORY] for env in found} == {"0.225"}


def test_shared_unevenly(machine):
    found = machine(2, 3)
    assert visible(found) == ["0", "0", "1"]
    assert [env[MEMORY] for env in found] == ["0.450", "0.450", "0.900"]


def test_what_the_user_allows(machine):
    assert visible(machine(8, 2, CUDA_VISIBLE_DEVICES="5,7")) == ["5", "7"]


@pytest.mark.parametrize("name", [MEMORY, OLD_MEMORY])
def test_the_memory_that_the_user_allows(machine, name):
    """The rank inherits it; JAX refuses both names at once."""
    assert machine(1, 2, **{name: "0.3"}) == [{"CUDA_VISIBLE_DEVICES": "0"}] * 2


def test_nothing_without_gpus(machine, tmp_path):
    assert machine(0, 4) == [{}] * 4
    assert gpu_environment({}, 0, 1, tmp_path / "missing") == {}
    assert machine(2, 2, JAX_PLATFORMS="cpu") == [{}, {}]
    assert machine(2, 1, CUDA_VISIBLE_DEVICES="") == [{}]
