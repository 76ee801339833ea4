"""Each example runs as a user runs it: copied to an empty folder, with the package and what it depends on.

Each is a process that compiles for itself, so those over 5 s are slow; what they show has faster tests.
`tests/house/test_wheel.py` runs them with the wheel.
"""

import ast
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import alone

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
STEP = re.compile(r"step +(\d+)  loss ([\d.]+)")


def run(*command, folder, **variables):
    """What a command printed that finds this checkout's package."""
    return alone.run(*command, folder=folder, **{"PYTHONPATH": str(REPOSITORY), **variables})


def losses(said):
    """By step, of the lines that a report prints."""
    return {int(step): float(loss) for step, loss in STEP.findall(said)}


def example(name, folder):
    """What an example prints; it leaves nothing behind."""
    shutil.copy(EXAMPLES / name, folder)
    said = run(sys.executable, name, folder=folder)
    assert [path.name for path in folder.iterdir()] == [name]
    return said


@pytest.mark.slow(reason="a process that compiles for itself")
def test_minimal(tmp_path):
    found = losses(example("minimal.py", tmp_path))
    assert list(found) == list(range(20)) and found[0] > 3.0 and found[19] < 0.4
    code = ast.parse((EXAMPLES / "minimal.py").read_text()).body[1:]  # without its docstring
    assert sum(bool(line) for line in ast.unparse(code).splitlines()) <= 30


@pytest.mark.costly(reason="a process that compiles for itself")
def test_own_data(tmp_path):
    *trained, equal = example("own_data.py", tmp_path).splitlines()
    assert [line.split()[0] for line in trained] == ["function", "iterable", "plan/load"]
    assert all(float(line.split()[-1]) < 0.2 * float(line.split()[-3]) for line in trained)
    assert equal == "equal losses: True"


@pytest.mark.slow(reason="a process that compiles for itself")
def test_lengths(tmp_path):
    said = example("lengths.py", tmp_path)
    several, single = (float(share) for share in re.findall(r"(\d+)%.*\n", said)[:2])
    assert several < 0.6 * single
    shapes = re.findall(r"step \d has (.*)", said)
    assert len(shapes) == 3 and all(len(set(own.split())) > 1 for own in shapes)
    assert losses(said)[19] < 0.5


@pytest.mark.slow(reason="10 s: a process that compiles for itself")
def test_tensor_and_data_parallelism(tmp_path):
    said = example("tp_dp.py", tmp_path)
    assert float(re.findall(r"accuracy ([\d.]+)", said)[-1]) > 0.9
    assert said.count("has (128, 256) of the kernel (128, 512)") == 2  # of one replica


@pytest.mark.slow(reason="a process that compiles for itself")
def test_multimodal(tmp_path):
    said = example("multimodal.py", tmp_path)
    assert losses(said)[29] < 0.2
    truth, read = re.search("a new picture of (.*) is read as (.*)", said).groups()
    assert truth == read


@pytest.mark.slow(reason="2 s: a process that compiles for itself; train/test_loggers.py has it")
def test_prometheus(tmp_path):
    shutil.copy(EXAMPLES / "prometheus.py", tmp_path)
    train = (sys.executable, "-m", "rrfp_jax", "train", "--config=prometheus.py")
    said = run(*train, f"--config.port={alone.free_port()}", folder=tmp_path)
    assert losses(said)[19] < 0.1 * losses(said)[0]


SBATCH = EXAMPLES / "slurm.sbatch"


@pytest.mark.slow(reason="processes that compile for themselves")
def test_slurm_resumes_where_it_was(tmp_path):
    """The file, with an `srun` that starts a single task."""
    for name in ("slurm.sbatch", "slurm_run.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    path = f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for steps in (3, 5):
        said = run("bash", "slurm.sbatch", f"--config.steps={steps}", folder=tmp_path, PATH=path)
    assert "resumes after 3 steps" in said
    assert list(losses(said)) == [3, 4]


def test_slurm_asks_as_the_file_for_all_configs_does():
    ours, whole = (
        set(re.findall(r"^#SBATCH (\S+)", file.read_text(), re.MULTILINE))
        for file in (SBATCH, REPOSITORY / "launch" / "slurm.sbatch")
    )
    # Without --no-kill, as nobody would start the run again in a job that has lost a node.
    assert ours - {"--time=1:00:00"} == whole - {"--no-kill"}


@pytest.mark.slow(reason="processes that compile for themselves")
@pytest.mark.parametrize("name", ["minimal.py", "own_data.py", "lengths.py", "tp_dp.py", "multimodal.py"])
def test_runs_with_a_process_per_stage(name, tmp_path):
    """With as many as its docstring says, and prints the same losses."""
    shutil.copy(EXAMPLES / name, tmp_path)
    (count,) = re.findall(rf"`rrfp launch -n (\d) {name}`", (EXAMPLES / name).read_text())
    launch = (sys.executable, "-m", "rrfp_jax", "launch", "-n", count, name)
    said = run(*launch, folder=tmp_path)
    assert losses(said) == pytest.approx(losses(run(sys.executable, name, folder=tmp_path)), abs=1e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports_nothing_but_the_package_and_what_it_depends_on(name):
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        asked = tomllib.load(file)["project"]["dependencies"]
    known = {re.split("[>=]", text)[0].replace("-", "_") for text in asked} | {"rrfp_jax"}
    modules = set()
    for node in ast.walk(ast.parse((EXAMPLES / name).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    tops = {module.partition(".")[0] for module in modules}
    assert tops - known <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", SCRIPTS)
def test_says_at_its_top_what_it_shows_and_how_to_start_it(name):
    shows, _, start = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())).partition("\n\n")
    assert len(shows.splitlines()) == 1 and name in start.splitlines()[0]


def test_the_page_has_them_all():
    page = (REPOSITORY / "docs" / "examples.md").read_text()
    assert [path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name not in page] == []
