"""Who imports whom, read from the sources with `ast`; nothing is imported to find out but the public API."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

import rrfp_jax as rrfp
from rrfp_jax import weights

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "rrfp_jax"

MAY_IMPORT = {  # of rrfp_jax's own parts, besides itself
    "core": set(),
    "sim": {"core"},
    "runtime": {"core", "errors"},
    "corpus": {"errors"},
    "train": {"core", "sim", "runtime", "corpus", "errors", "schedules"},
    "errors": set(),
    "schedules": {"core", "sim"},
    "data": {"corpus", "train"},
    "weights": {"train"},
    "__init__": {"errors", "schedules", "data", "sim", "runtime", "train"},
}
PRIVATE_JAX = re.compile(r"jax\._(?!_)|jax\.(lib|interpreters)\b|jaxlib\b")
MAY_USE_PRIVATE_JAX = {PACKAGE / "runtime" / "_jax.py", PACKAGE / "runtime" / "_service.py"}
OWN = ("rrfp_jax", "configs", "launch", "benchmarks", "tests")


def imported(tree):
    """The dotted names of everything that a module imports, wherever in it; `from a import b` is `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def used(tree):
    """The dotted names that stand in a module, such as `jax.tree.map`, with its `import ... as` undone."""
    names = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        path = []
        while isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value  # noqa: PLW2901
        if path and isinstance(node, ast.Name):
            yield ".".join([names.get(node.id, node.id), *reversed(path)])


def under(name, roots):
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def upward_imports(part, tree):
    """What a module of one part of rrfp_jax imports although that stands above it."""
    allowed = [f"rrfp_jax.{below}" for below in MAY_IMPORT[part] | {part}]
    allowed += ["rrfp_jax.schedules", "rrfp_jax.data"] if part == "__init__" else []
    wrong = [name for name in imported(tree) if under(name, OWN) and not under(name, allowed)]
    if part in ("core", "sim"):
        wrong += [n for n in imported(tree) if n.split(".")[0] not in {"rrfp_jax", *sys.stdlib_module_names}]
    return wrong


def private_jax(tree):
    return [name for name in (*imported(tree), *used(tree)) if PRIVATE_JAX.match(name)]


def not_public(tree):
    """What a module takes from rrfp_jax that is not in its `__all__`, nor in those of its namespaces."""
    public = {f"rrfp_jax.{name}" for name in (*rrfp.__all__, "weights")}
    inside = {
        module.__name__: {f"{module.__name__}.{name}" for name in module.__all__}
        for module in (rrfp.schedules, rrfp.data, weights)
    }
    taken = [n for n in (*imported(tree), *used(tree)) if under(n, ["rrfp_jax"]) and n != "rrfp_jax"]
    return [
        name
        for name in taken
        if ".".join(name.split(".")[:2]) not in public
        or any(
            name.startswith(f"{space}.") and ".".join(name.split(".")[:3]) not in names
            for space, names in inside.items()
        )
    ]


def sources(*folders):
    """Every Python file and notebook of these folders, parsed, as parameters of a test."""
    paths = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*"))]
    found = [
        path for path in paths if path.suffix in {".py", ".ipynb"} and ".ipynb_checkpoints" not in path.parts
    ]
    assert found
    return [pytest.param(path, id=path.relative_to(REPOSITORY).as_posix()) for path in found]


def parse(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    return ast.parse(text)


@pytest.mark.parametrize("path", sources("rrfp_jax"))
def test_layers_point_downward(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert upward_imports(part, parse(path)) == []


@pytest.mark.parametrize(
    "path", sources("rrfp_jax", "models", "configs", "launch", "notebooks", "benchmarks")
)
def test_private_jax_is_used_in_one_place(path):
    assert path in MAY_USE_PRIVATE_JAX or private_jax(parse(path)) == []


@pytest.mark.parametrize("path", sources("models"))
def test_models_import_nothing_of_ours(path):
    assert [name for name in imported(parse(path)) if under(name, OWN)] == []


@pytest.mark.parametrize("path", sources("launch"))
def test_launchers_are_thin(path):
    assert all(under(name, ["rrfp_jax.commands"]) for name in imported(parse(path)) if under(name, OWN))
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 10


@pytest.mark.parametrize("path", sources("configs", "notebooks", "tests/scripts"))
def test_users_code_needs_only_the_public_api(path):
    assert not_public(parse(path)) == []


@pytest.mark.parametrize("path", sources("rrfp_jax"))
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_public_api_is_small_and_there():
    assert len(rrfp.__all__) <= 12
    assert all(hasattr(rrfp, name) for name in rrfp.__all__)


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (lambda tree: upward_imports("core", tree), "import numpy"),
        (lambda tree: upward_imports("core", tree), "def f():\n    from rrfp_jax.errors import UsageError"),
        (lambda tree: upward_imports("runtime", tree), "from rrfp_jax.train.report import Report"),
        (lambda tree: upward_imports("runtime", tree), "from rrfp_jax import sim"),
        (lambda tree: upward_imports("sim", tree), "from rrfp_jax.runtime.driver.driver import Driver"),
        (lambda tree: upward_imports("sim", tree), "import numpy"),
        (lambda tree: upward_imports("train", tree), "import rrfp_jax"),
        (private_jax, "from jax import _src"),
        (private_jax, "from jax._src.lib import xla_client"),
        (private_jax, "import jax as j\nj.lib.xla_bridge.get_backend()"),
        (not_public, "from rrfp_jax.train.trainer import Trainer"),
        (not_public, "import rrfp_jax as rrfp\nrrfp.train.Trainer"),
        (not_public, "import rrfp_jax as rrfp\nrrfp.schedules.ready"),
        (not_public, "import rrfp_jax as rrfp\nrrfp.data.Draw"),
        (lambda tree: upward_imports("corpus", tree), "from rrfp_jax.data.contract import Microbatch"),
    ],
)
def test_the_rules_can_fail(rule, source):
    assert rule(ast.parse(source))


@pytest.mark.parametrize("path", sources("rrfp_jax/runtime/autodiff"))
def test_autodiff_knows_nothing_of_the_runtime_around_it(path):
    known = ("autodiff", "_jax", "compiling")
    allowed = ["rrfp_jax.errors", *(f"rrfp_jax.runtime.{name}" for name in known)]
    assert [name for name in imported(parse(path)) if under(name, OWN) and not under(name, allowed)] == []
