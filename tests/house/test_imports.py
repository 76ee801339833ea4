"""What can be imported, and asked for help, without JAX and without delay."""

import subprocess
import sys
from pathlib import Path

import pytest

import rrfp_jax as rrfp
from rrfp_jax.commands.verbs import VERBS

ROOT = Path(__file__).parents[2]

WITHOUT_JAX = """
import resource, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "flax", "optax", "numpy"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Refuse())
"""

SECONDS = """
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


def python(code):
    command = [sys.executable, "-c", WITHOUT_JAX + code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_and_the_simulator_need_no_jax():
    code = """
import importlib, pkgutil
import rrfp_jax.core, rrfp_jax.sim, rrfp_jax.studies
for package in (rrfp_jax.core, rrfp_jax.sim, rrfp_jax.studies):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
import rrfp_jax as rrfp
found = rrfp.simulate("log-normal", ["1f1b", rrfp.schedules.BF()], stages=2, microbatches=4)
print(sorted(found), "data" in dir(rrfp))
try:
    rrfp.Trainer
except ImportError as error:
    print(str(error).endswith("is blocked"))
"""
    assert python(code).splitlines() == ["['1f1b', 'bf'] True", "True"]


def test_layers_that_are_functions_need_no_flax():
    code = """
import sys
import rrfp_jax as rrfp
layer = rrfp.layer(lambda carry, mb: carry)
rrfp.Trainer
print("flax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


COMMANDS = [*VERBS]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_told_at_once(command):
    code = f"from rrfp_jax.commands.cli import main\nassert main([{command!r}, '--help']) == 0"
    *said, seconds = python(code + SECONDS).splitlines()
    assert "usage:" in said[0]
    assert float(seconds) < 0.4  # of CPU, with Python itself


def test_what_is_mistyped_is_refused_without_jax():
    typed = [(command, ["--nonsense"]) for command in COMMANDS]
    typed += [(command, ["configs/quickstart.py"]) for command in COMMANDS if command != "why"]
    typed += [(command, ["--config=absent.py"]) for command in ("launch", "plan", "train")]
    code = f"""
from rrfp_jax.commands.cli import main
for command, argv in {typed}:
    assert main([command, *argv]) == 2, command
"""
    python(code)


def test_every_public_name_is_what_it_says():
    for name in rrfp.__all__:
        assert getattr(rrfp, name).__name__ in (name, f"rrfp_jax.{name}")
    assert set(rrfp.__all__) <= set(dir(rrfp))
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        rrfp.Trainr  # noqa: B018
