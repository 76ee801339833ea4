"""The wheel: what is in it, and what a user can do with nothing but it."""

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of
from tests.support.alone import free_port, run

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "tests" / "scripts"
EXAMPLES = REPOSITORY / "examples"
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since setuptools puts whatever lies in an old `build` folder into the wheel."""
    source, folder = tmp_path_factory.mktemp("source") / "rrfp", tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY, source, ignore=NOT_COPIED)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, folder=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of the commands of a new environment with the wheel in it and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    installed = {path.name for path in site_packages.iterdir()}
    assert installed == {"rrfp_jax", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    lent = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    (site_packages / "lent.pth").write_text("\n".join(lent))
    return folder / "bin"


def test_holds_the_package_and_its_commands_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (commands,) = (name for name in names if name.endswith("/entry_points.txt"))
        head, *lines = archive.read(commands).decode().splitlines()
    assert head == "[console_scripts]"
    assert [line for line in lines if line] == ["rrfp = rrfp_jax.commands.cli:run"]
    distribution = "-".join(wheel.name.split("-")[:2])
    assert {name.split("/")[0] for name in names} == {"rrfp_jax", f"{distribution}.dist-info"}
    sources = {path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("rrfp_jax/**/*.py")}
    assert {name for name in names if name.startswith("rrfp_jax/")} == {*sources, "rrfp_jax/py.typed"}


@pytest.mark.slow(reason="scripts in an environment of the wheel")
@pytest.mark.parametrize("name", ["nnx_script.py", "linen_script.py"])
def test_trains_from_an_empty_folder(environment, tmp_path, name):
    script = shutil.copy(SCRIPTS / name, tmp_path)
    assert len(Path(script).read_text(encoding="utf-8").splitlines()) <= 40
    run(environment / "python", script, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow(reason="a script in an environment of the wheel")
def test_the_script_of_the_readme_runs_from_an_empty_folder(environment, tmp_path):
    (block,) = (own for own in blocks_of(REPOSITORY / "README.md") if own.language == "python")
    assert block.given == "" and len(block.code.splitlines()) <= 20
    (tmp_path / "train.py").write_text(block.code, encoding="utf-8")
    assert block.printed and run(environment / "python", "train.py", folder=tmp_path) == block.printed


@pytest.mark.slow(reason="scripts in an environment of the wheel")
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_runs_every_example_from_an_empty_folder(environment, tmp_path, name):
    shutil.copy(EXAMPLES / name, tmp_path)
    if "get_config" in (EXAMPLES / name).read_text(encoding="utf-8"):
        port = [f"--config.port={free_port()}"] if name == "prometheus.py" else []
        run(environment / "rrfp", "train", f"--config={name}", *port, folder=tmp_path)
    else:
        run(environment / "python", name, folder=tmp_path)


RUN = """
from dataclasses import dataclass
import optax
import rrfp_jax as rrfp
from own_model import data, layers, loss

@dataclass(frozen=True, kw_only=True)
class Run(rrfp.RunConfig):
    rate: float = 0.1  # of every step

    def pipeline(self):
        return rrfp.Pipeline(layers(), loss)

    def optimizer(self):
        return optax.sgd(self.rate)

    def train_data(self):
        return data

def get_config():
    return Run(name="own", steps=2, mesh=rrfp.Mesh(pp=2))
"""

OWN_MODEL = """
import jax.numpy as jnp
import numpy as np
import rrfp_jax as rrfp

WIDTH = 4

def layers():
    scale = lambda params, carry, mb: params["w"] * (mb["x"] if carry is None else carry)
    return [rrfp.layer(scale, init=lambda key: {"w": jnp.ones(WIDTH)}, repeat=2)]

def loss(carry, mb):
    return rrfp.Loss((carry**2).sum(), weight=carry.shape[0])

def data(step):
    return [{"x": np.full((2, WIDTH), 1.0 + step, np.float32)} for _ in range(2)]
"""


@pytest.mark.slow(reason="a run in an environment of the wheel")
def test_launches_a_run_anywhere_with_the_modules_beside_its_config(environment, tmp_path):
    """In every one of its processes, from another folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.py").write_text(RUN)
    (tmp_path / "mine" / "own_model.py").write_text(OWN_MODEL)
    said = run(environment / "rrfp", "launch", "--config=mine/run.py", "--config.steps=3", folder=tmp_path)
    assert "step     2" in said and (tmp_path / "runs" / "own" / "rank-1.log").exists()
    listed = run(environment / "rrfp", "launch", "--config=mine/run.py", "--help", folder=tmp_path)
    assert "--config.rate=0.1\n        of every step" in listed


@pytest.mark.slow(reason="2 s: processes; the test of what it holds has the wheel")
def test_is_used_from_the_new_environment(environment, tmp_path):
    where = "from importlib.util import find_spec; print(find_spec('rrfp_jax').origin)"
    assert run(environment / "python", "-c", where, folder=tmp_path).startswith(str(environment.parent))


@pytest.mark.slow(reason="2 s: an environment; test_holds_the_package_and_its_commands_only has the commands")
def test_has_a_command(environment, tmp_path):
    assert "usage: rrfp train " in run(environment / "rrfp", "train", "--help", folder=tmp_path)
