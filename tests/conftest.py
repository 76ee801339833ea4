"""Four virtual CPU devices for every test, compiled programs kept between tests and runs, shared fixtures."""

import gc
import os
import signal
from pathlib import Path

import jax
import pytest
from hypothesis import settings

from tests.support.kept import FAST_COMPILING, share_contexts, share_programs

# Most of a test's time is XLA compiling. Without optimizations that takes a quarter of the time, here and in
# the processes that tests start. Tests marked `optimized` are about what XLA makes of programs: `make test`
# runs them with RRFP_TEST_OPTIMIZED=1.
given = os.environ.get("XLA_FLAGS", "")
if "RRFP_TEST_OPTIMIZED" not in os.environ and FAST_COMPILING not in given:  # workers have them already
    os.environ["XLA_FLAGS"] = f"{given} {FAST_COMPILING}".strip()

# Shells start background jobs with Ctrl-C ignored, which what tests start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
share_contexts()
share_programs()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
settings.register_profile("untimed", deadline=None)  # machines are busy
settings.load_profile("untimed")
# Many programs are those of another test.
KEPT = Path(__file__).parent.parent / ".pytest_cache"
jax.config.update("jax_compilation_cache_dir", str(KEPT / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# XLA's own caches, of GPUs, would put this folder's path into the keys: other checkouts would compile anew.
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
# Each of the many processes that tests start would compile all our Python, 0.3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What tests store is sealed with a key of theirs, here and in the processes that they start.
os.environ.setdefault("RRFP_KEY_FILE", str(KEPT / "programs.key"))

FIRST = [
    *("train/test_processes.py", "runtime/test_agreement.py", "house/test_wheel.py", "commands/test_plan.py"),
    *("train/test_second_start.py", "train/test_transports.py", "house/test_notebook.py"),
    *("launcher/test_failures.py", "launcher/test_hangs.py", "train/test_trainer.py"),
    *("train/test_moving_layers.py", "train/test_numbers.py", "train/test_parity.py", "train/test_put_in.py"),
]
"""Files that take longest, many for few tests: begun last, one would keep a single worker busy."""
assert all((Path(__file__).parent / name).exists() for name in FIRST), FIRST


def pytest_collection_modifyitems(items):
    """Whole files change places, if `--no-loadscope-reorder` lets them be."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(FIRST)))


def pytest_collection_finish():
    """What is there now stays: collecting garbage need not look at thousands of tests again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # to look through what tracing makes took 4 % of the time


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


@pytest.fixture
def jax_keeps_nothing():
    """JAX's own cache of compiled programs, which the other tests use, is off."""
    from jax.experimental.compilation_cache import compilation_cache

    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
