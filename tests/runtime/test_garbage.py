"""Python's garbage collector while a step's tasks run."""

import gc

import pytest

from rrfp_jax.runtime.driver.garbage import no_collections


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_it_was_afterwards(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="of a task"), no_collections():
            assert not gc.isenabled()
            raise ValueError("of a task")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
