"""Four virtual CPU devices for every test, compiled programs kept between tests and runs, shared fixtures."""

import os
import signal
from pathlib import Path

import jax
import pytest

# Most of a test's time is XLA compiling. Without optimizations that takes a quarter of the time, here and in
# the processes that tests start. Tests marked `optimized` are about what XLA makes of programs: `make test`
# runs them with RRFP_TEST_OPTIMIZED=1.
FAST_COMPILING = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
if "RRFP_TEST_OPTIMIZED" not in os.environ:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILING}"

# Shells start background jobs with Ctrl-C ignored, which what tests start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
# Many programs are those of another test.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="module")
def trainer():
    """One for all tests of a module that need compiled programs."""
    from tests.support import (
        refusals,
        toy,  # after the configuration above
    )

    trainer = toy.trainer(2, data=refusals.BATCH)
    trainer.start()
    return trainer


@pytest.fixture
def all_closed():
    """Mailboxes are closed at the end of a test."""
    from tests.support import mailboxes

    yield
    while mailboxes.made:
        mailboxes.made.pop().close()
