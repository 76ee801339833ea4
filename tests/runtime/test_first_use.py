"""JAX used before a run is joined: who did it is named, and whoever joins first is not concerned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORTS = "import rrfp_jax as rrfp\n"
USES = "import early_user\n"
MAKES = "from tests.support import toy\ntoy.trainer(3)\n"


@pytest.fixture
def package(tmp_path):
    """Where a package is installed that uses JAX when it is imported."""
    folder = tmp_path / "lib" / "python3" / "site-packages" / "early_user"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from early_user.inner import f\n")
    (folder / "inner.py").write_text("import jax\n\ndef f(key=jax.random.key(0)): ...\n")
    return folder.parent


def run(package, folder, text, *command, **settings):
    """Run a script with environment variables; its exit status, and what it said last."""
    (folder / "script.py").write_text(text)
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    environment |= {"PYTHONPATH": f"{package}:{ROOT}", "JAX_PLATFORMS": "cpu"} | settings
    done = subprocess.run(
        [sys.executable, *command, "script.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


DIRECT = "by LIB/early_user/inner.py:3 (`def f(key=jax.random.key(0)): ...`), reached from "
CASES = {
    "after rrfp_jax": (IMPORTS + USES, DIRECT + "HERE/script.py:2 (`import early_user`); "),
    "after both": ("import jax\n" + IMPORTS + USES, DIRECT + "HERE/script.py:3 (`import early_user`); "),
    "by the script": (IMPORTS + "import jax\nx = jax.numpy.ones(3)\n", "by HERE/script.py:3 (`x = jax."),
    "before rrfp_jax": (USES + IMPORTS, "by code that ran before `import rrfp_jax` (put that first, "),
}


@pytest.mark.parametrize(("text", "says"), CASES.values(), ids=CASES)
def test_one_process_is_told_who_used_jax_first(package, tmp_path, text, says):
    status, said = run(package, tmp_path, text + MAKES)
    says = says.replace("LIB", str(package)).replace("HERE", str(tmp_path))
    assert status == 1 and "Mesh(pp=3) needs 3 devices and this process has 1 (cpu): JAX was used" in said
    assert says in said and "call jax.config.update('jax_num_cpu_devices', 3) before that" in said


@pytest.mark.slow(reason="2 s: a process")
def test_a_script_in_a_folder_named_like_a_package_is_named(package, tmp_path):
    (folder := tmp_path / "jax").mkdir()
    text, says = CASES["by the script"]
    _, said = run(package, folder, text + MAKES)
    assert says.replace("HERE", str(folder)) in said


@pytest.mark.slow(reason="a process for each case")
@pytest.mark.parametrize(
    ("variable", "value"),
    [("XLA_FLAGS", "--xla_force_host_platform_device_count=2"), ("JAX_NUM_CPU_DEVICES", "2")],
)
def test_whoever_asked_for_too_few_devices_is_named(package, tmp_path, variable, value):
    status, said = run(package, tmp_path, IMPORTS + MAKES, **{variable: value})
    assert status == 1 and "this process has 2 (cpu): " in said and "asks for so many: ask for 3, or" in said
    assert variable in said and "JAX was used" not in said


LAUNCH = ("-m", "rrfp_jax", "launch", "-n", "2")


@pytest.mark.slow(reason="5 s: a launch; train/test_processes.py has such")
@pytest.mark.parametrize("joins", ["", "rrfp.join()\n"])
def test_a_script_joins_before_it_imports_what_uses_jax(package, tmp_path, joins):
    made = "from tests.support import toy\ntoy.trainer(2)\nprint('done')\n"
    status, said = run(package, tmp_path, IMPORTS + joins + USES + made, *LAUNCH)
    if joins:
        assert (status, said.count("done")) == (0, 2)
    else:
        assert status == 2 and "inner.py:3" in said and "script.py:2 (`import early_user`); begin" in said
