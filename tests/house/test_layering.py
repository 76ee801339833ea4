"""Who imports whom, and how long things are, read from the sources with `ast`."""

import ast
import json
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rrfp_jax as rrfp
from tests.support.syntax import arguments_of, imported, lines_of, named, used

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "rrfp_jax"

ARROWS = {
    "authors": set(),
    "environment": set(),
    "errors": set(),
    "files": set(),
    "garbage": set(),
    "json_files": {"fields", "files"},
    "user_code": {"authors", "errors", "printing"},
    "tracebacks": {"authors", "environment", "errors", "printing"},
    "fields": {"errors"},
    "loss_scale": {"fields", "json_files"},
    "printing": set(),
    "progress": set(),
    "random_keys": set(),
    "typed": {"environment"},
    "core": set(),
    "trace": {"core"},
    "sim": {"garbage", "trace"},
    "studies": {"sim"},
    "schedules": {"sim"},
    "data": {"json_files", "trace", "user_code"},
    # The runtime: what one process knows of others ...
    "runtime._jax": {"environment"},
    "runtime.run": {"authors", "trace", "json_files", "printing", "runtime._jax"},
    "runtime.transport": {"runtime.run"},
    "nixl": {"runtime.transport"},  # a transport as anybody can write one: `choice` loads it by name
    # ... what a stage computes ...
    "runtime.sizes": set(),
    "runtime.autodiff": {"errors", "random_keys", "runtime._jax", "runtime.sizes"},
    "runtime.model": {"authors", "core", "fields", "runtime.autodiff"},
    "runtime.mesh": {"runtime.model", "runtime.run"},
    "runtime.programs": {"files", "printing", "progress", "runtime.mesh", "runtime.model"},
    "runtime.stages": {"runtime.programs", "runtime.transport", "trace"},
    # ... and when.
    "runtime.engine": {"garbage", "loss_scale", "runtime.stages"},
    # What is made of it.
    "forecast": {"data", "runtime.engine", "sim"},
    "checkpoint": {"json_files", "printing", "progress", "random_keys", "runtime.run"},
    "name_lock": {"files", "runtime.run"},
    "report": {"environment", "json_files", "name_lock", "printing", "progress", "sim"},
    "weights": {"checkpoint", "fields", "files", "runtime.programs"},
    "train": {"checkpoint", "data", "fields", "forecast", "report", "runtime.engine"},
    "runs": {"train", "typed"},
    "launcher": {"name_lock", "progress", "typed"},
    "commands": {"fields", "launcher", "nixl", "runs", "studies", "weights"},
    # What users import.
    "loggers": {"train"},
    "__main__": {"commands"},
    "__init__": {"commands", "loggers", "schedules", "tracebacks", "weights"},
}
YET_TO_CUT: set[tuple[str, str]] = set()
"""By file and room: arrows that are not in `ARROWS` and must go. Delete a line when its arrow is cut."""

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_ARGUMENTS = 600, 50, 10
"""Of a function without its docstring, which is not counted against those who explain; of a constructor
without `self`, or the fields of a dataclass."""

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_ARGUMENTS: dict[str, str] = {
    "commands/preflight/surroundings.py:Surroundings": "what was found, one field a finding",
    "data/documents.py:Documents": "what users type, flat",
    "weights/families.py:Family": "a record, one field a fact",
    "report/look.py:Seen": "a record, one field a finding",
    "runtime/engine/device.py:Running": "a record, one field a figure",
    "runtime/run/recorder.py:Recording": "a record, one field a fact",
    "runtime/engine/settings.py:Settings": "what users type, flat",
    "train/report.py:Report": "a record, one field a figure",
    "train/trainer.py:Trainer": "what users type, flat",
}
"""What is longer, and why; a test fails when one of them no longer is."""

PRIVATE_JAX = re.compile(r"jax\._(?!_)|jax\.(lib|interpreters)\b|jaxlib\b")
MAY_USE_PRIVATE_JAX = {PACKAGE / "runtime" / "_jax.py", PACKAGE / "runtime" / "run" / "coordinator.py"}
OWN = ("rrfp_jax", "configs", "examples", "benchmarks", "tests")


def under(name, roots):
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def room_of(parts):
    """The room of a file or of an imported name, given by its parts below `rrfp_jax`."""
    parts = [part.removesuffix(".py") for part in parts]
    return ".".join(parts[:2] if parts[0] == "runtime" else parts[:1])


def below(room):
    """All rooms that one may use."""
    found, new = set(), {room}
    while new:
        found |= new
        new = set().union(*(ARROWS[one] for one in new)) - found
    return found


def upward_imports(room, tree):
    """What a module of a room imports although it stands in none that this one may use."""
    allowed = below(room)
    ours = [name for name in imported(tree) if under(name, OWN)]
    wrong = [
        name
        for name in ours
        if not name.startswith("rrfp_jax.") or room_of(name.split(".")[1:]) not in allowed
    ]
    if room in ("core", "sim", "studies"):
        wrong += [n for n in imported(tree) if n.split(".")[0] not in {"rrfp_jax", *sys.stdlib_module_names}]
    return wrong


def long_functions(tree):
    """Functions that do not fit a screen, by name."""
    kind = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {name for name, node in named(tree, kind) if lines_of(node) > MOST_LINES_OF_A_FUNCTION}


def many_arguments(tree):
    """Classes that take too many arguments, by name."""
    return {name for name, node in named(tree, ast.ClassDef) if arguments_of(node) > MOST_ARGUMENTS}


def private_jax(tree):
    return [name for name in (*imported(tree), *used(tree)) if PRIVATE_JAX.match(name)]


def not_public(tree):
    """What a module takes from rrfp_jax that is not in its `__all__`, nor in those of its namespaces."""
    public = {f"rrfp_jax.{name}" for name in rrfp.__all__}
    inside = {
        module.__name__: {f"{module.__name__}.{name}" for name in module.__all__}
        for module in (rrfp.schedules, rrfp.data, rrfp.loggers, rrfp.weights)
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
def test_arrows_point_downward(path):
    parts = path.relative_to(PACKAGE).parts
    room = room_of(parts)
    if room == "runtime.__init__":
        assert list(imported(parse(path))) == []
        return
    known = {above for file, above in YET_TO_CUT if file == "/".join(parts)}
    wrong = upward_imports(room, parse(path))
    assert [name for name in wrong if room_of(name.split(".")[1:]) not in known] == []
    assert {room_of(name.split(".")[1:]) for name in wrong} == known, "cut: delete its line"


def test_rooms_are_those_that_there_are():
    rooms = {room_of(path.relative_to(PACKAGE).parts) for path in PACKAGE.rglob("*.py")}
    assert rooms - {"runtime.__init__"} == {*ARROWS}
    assert all((PACKAGE / file).exists() for file, _ in YET_TO_CUT)


def test_arrows_make_no_circle():
    TopologicalSorter(ARROWS).prepare()  # raises CycleError


@pytest.mark.parametrize("path", sources("rrfp_jax", "models", "configs", "notebooks", "benchmarks"))
def test_private_jax_is_used_in_one_place(path):
    assert path in MAY_USE_PRIVATE_JAX or private_jax(parse(path)) == []


def test_the_environment_is_read_in_one_file():
    reads = re.compile(r"\b(environb?|getenv)\b")
    found = [path for path in PACKAGE.rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))]
    assert found == [PACKAGE / "environment.py"]


@pytest.mark.parametrize("path", sources("models"))
def test_models_import_nothing_of_ours(path):
    assert [name for name in imported(parse(path)) if under(name, OWN)] == []


@pytest.mark.parametrize("path", sources("configs", "notebooks", "tests/scripts"))
def test_users_code_needs_only_the_public_api(path):
    assert not_public(parse(path)) == []


def of_file(exceptions, path):
    """The names that are excepted in a file."""
    file = path.relative_to(PACKAGE).as_posix()
    return {name for of, _, name in (place.partition(":") for place in exceptions) if of == file}


@pytest.mark.parametrize("path", sources("rrfp_jax"))
def test_what_is_long_has_a_reason(path):
    tree = parse(path)
    is_long = len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES
    assert is_long == bool(of_file(LONG_FILES, path))
    assert long_functions(tree) == of_file(LONG_FUNCTIONS, path)
    assert many_arguments(tree) == of_file(MANY_ARGUMENTS, path)


def test_exceptions_are_of_files_that_there_are():
    places = [*LONG_FILES, *LONG_FUNCTIONS, *MANY_ARGUMENTS]
    assert all((PACKAGE / place.partition(":")[0]).exists() for place in places)


def test_the_public_api_is_small_and_there():
    assert len(rrfp.__all__) <= 23
    assert all(hasattr(rrfp, name) for name in rrfp.__all__)


def above(room):
    """The rule for a module of a room."""
    return lambda tree: upward_imports(room, tree)


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (above("core"), "import numpy"),
        (above("core"), "def f():\n    from rrfp_jax.errors import UsageError"),
        (above("runtime.engine"), "from rrfp_jax.train.report import Report"),
        (above("runtime.engine"), "from rrfp_jax import sim"),
        (above("runtime.programs"), "from rrfp_jax.runtime.stages.stage import Stage"),
        (above("runtime.model"), "from rrfp_jax.runtime import programs"),
        (above("launcher"), "from rrfp_jax.train.report import Report"),
        (above("sim"), "from rrfp_jax.runtime.engine.loop import Driver"),
        (above("sim"), "import numpy"),
        (above("sim"), "from rrfp_jax.studies.families import Step"),
        (above("train"), "import rrfp_jax"),
        (above("train"), "from rrfp_jax import UsageError"),
        (above("train"), "import tests.support.toy"),
        (above("data"), "from rrfp_jax.runtime.model.pipeline import Pipeline"),
        (above("runtime.autodiff"), "from rrfp_jax.core.tasks import Task"),
        (private_jax, "from jax import _src"),
        (private_jax, "from jax._src.lib import xla_client"),
        (private_jax, "import jax as j\nj.lib.xla_bridge.get_backend()"),
        (not_public, "from rrfp_jax.train.trainer import Trainer"),
        (not_public, "import rrfp_jax as rrfp\nrrfp.train.Trainer"),
        (not_public, "import rrfp_jax as rrfp\nrrfp.schedules.ready"),
        (not_public, "import rrfp_jax as rrfp\nrrfp.data.Draw"),
        (long_functions, "class A:\n    def f(self):\n" + "        pass\n" * 50),
        (many_arguments, f"class A:\n    def __init__(self, {', '.join('abcdefghijk')}): pass"),
        (
            many_arguments,
            "@dataclass(frozen=True)\nclass A:\n" + "".join(f"    {x}: int\n" for x in "abcdefghijk"),
        ),
    ],
)
def test_the_rules_can_fail(rule, source):
    assert rule(ast.parse(source))


def test_a_docstring_is_not_counted():
    lines = "    a line\n" * 60
    tree = ast.parse(f'def f():\n    """What it does.\n{lines}    """\n    return 1\n')
    assert long_functions(tree) == set()
