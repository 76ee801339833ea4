"""Arrays on their way to a device, by a shorter way than `jax.device_put`, and back."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rrfp_jax.runtime._jax import HostCopier, fetch

VALUES = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "strided": np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::-3],
    "float64": np.array([1.0, 1e-50]),  # which JAX makes float32 of
    "bfloat16": np.ones((2, 2), ml_dtypes.bfloat16),
    "float8": np.ones(3, ml_dtypes.float8_e4m3fn),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 3), np.uint8),
    "scalar": np.array(7, np.int16),
    "number": np.float32(2.0),
    "jax": jnp.arange(3),
    "read only": np.broadcast_to(np.float32(1.0), (3, 2)),
}


@pytest.mark.parametrize("name", VALUES)
def test_it_gives_what_device_put_gives(name):
    device, value = jax.devices()[1], VALUES[name]
    first, found = HostCopier(device)([value, value])
    np.testing.assert_array_equal(np.asarray(first), np.asarray(found))
    expected = jax.device_put(value, device)
    assert (found.dtype, found.shape, found.sharding) == (expected.dtype, expected.shape, expected.sharding)
    assert found.committed and found.weak_type == expected.weak_type
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_it_is_meant_so_no_guard_stops_it():
    with jax.transfer_guard("disallow"):
        _, found = HostCopier(jax.devices()[0])([VALUES["float32"]] * 2)
    np.testing.assert_array_equal(found, VALUES["float32"])


def test_what_is_not_there_for_jax_is_refused():
    with pytest.raises(TypeError):
        HostCopier(jax.devices()[0])([np.array(["a"])])


@pytest.mark.parametrize(("platform", "copies"), [("gpu", 1), ("cpu", 0)])
def test_only_what_is_not_on_the_host_is_copied_there(platform, copies):
    begun = []
    devices = [SimpleNamespace(platform=platform)] * 2
    fetch(SimpleNamespace(devices=lambda: devices, copy_to_host_async=lambda: begun.append(platform)))
    assert len(begun) == copies
