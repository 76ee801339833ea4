"""What the package reads, runs and listens on, by its syntax trees.

reads.md lists all reads, docs/security.md all ports.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.support.syntax import imported, named, used

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "rrfp_jax"

READERS = {
    *(
        "open",
        "open_regular",
        "open_own",
        "opened_binary",
        "read_whole",
        "read_end",
        "read_text",
        "read_bytes",
    ),
    *("read_json", "load_json", "read_file", "open_memmap", "memmap", "fromfile", "loadtxt", "genfromtxt"),
    *("safe_open", "from_file", "SentencePieceProcessor", "load_from_disk", "spec_from_file_location"),
}
"""Functions and methods that open a file, wherever they are from."""

WRITING = re.compile(r"O_WRONLY|O_RDWR|O_DIRECTORY|['\"](?:[wax]b?\+?)['\"]")

OPEN_NO_FILES = {
    "runtime/run/handshake.py": "a door",
    "checkpoint/saving.py": "a checkpoint, which folder.py reads",
}

LISTENERS = {
    *("listen", "create_server", "start_transfer_server", "get_distributed_runtime_service"),
    "start_http_server",
    "createBackend",
}

RUNS = re.compile(
    r"(c?pickle|cloudpickle|dill|marshal|shelve|joblib|torch)\.(loads?|Unpickler|open)|(np|numpy)\.load"
    r"|.*\.(deserialize_and_load|deserialize_executable|exec_module)|(importlib\.)?import_module|__import__"
    r"|eval|exec|compile|runpy\..*|os\.(system|popen|exec.*)|ctypes\.(CDLL|cdll|PyDLL)|imp\..*|code\..*|yaml\..*"
)
"""What runs what it is given, or can."""

MAY_RUN = {
    ("runtime/programs/executables.py", "_read", "pickle.loads"),
    ("runtime/programs/executables.py", "load", "serialize_executable.deserialize_and_load"),
    ("runtime/_jax.py", "load_for.Mover.persistent_load", "self.backend.deserialize_executable"),
    ("runs/config.py", "load_config", "spec.loader.exec_module"),  # the user's own program
    ("runtime/run/stacks.py", "WhenImported.find_spec", "spec.loader.exec_module"),  # JAX itself
    ("nixl/agent.py", "bindings", "importlib.import_module"),  # by names in the code
    ("runtime/transport/choice.py", "_candidates", "import_module"),  # by names in the code
    ("errors.py", "imported", "importlib.import_module"),  # by names that stand in the code
    ("__init__.py", "__getattr__", "import_module"),
    ("weights/__init__.py", "__getattr__", "import_module"),
    ("commands/cli.py", "run_verb.body", "import_module"),  # by names in the table
    ("commands/cli.py", "_without_verb", "import_module"),  # that name
    ("runtime/engine/device.py", "_prctl", "ctypes.CDLL"),  # of None: the C library that is there
}


def modules():
    """Every module by its path, as a syntax tree."""
    found = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    assert len(found) > 100
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in found.items()}


@pytest.fixture(scope="module")
def trees():
    return modules()


def calls(tree):
    """The calls in a module, with the last name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            yield node, node.func.id if isinstance(node.func, ast.Name) else node.func.attr


def reads(tree):
    """Whether a module opens something that it reads."""
    return any(name in READERS and not WRITING.search(ast.unparse(node)) for node, name in calls(tree))


def listens(tree):
    """Whether a module opens a port; `listen(address)` is ours, `socket.listen(n)` the system's."""
    return any(
        name in LISTENERS and (isinstance(node.func, ast.Attribute) or name != "listen")
        for node, name in calls(tree)
    )


def running(tree):
    """What in a module may run what it is given: the innermost function, and the name that stands there."""
    functions = list(named(tree, (ast.FunctionDef, ast.AsyncFunctionDef)))
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Name, ast.Attribute)) or not RUNS.fullmatch(name := ast.unparse(node)):
            continue
        around = [one for one in functions if one[1].lineno <= node.lineno <= one[1].end_lineno]
        yield max(around, key=lambda one: one[1].lineno, default=("", None))[0], name


READS = Path(__file__).with_name("reads.md")
SECURITY = REPOSITORY / "docs" / "security.md"


def section(page, title):
    text = page.read_text(encoding="utf-8")
    return re.search(rf"^##? {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


def listed(page, title):
    """The modules that a section of a page names in its table."""
    rows = [line for line in section(page, title).splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)}


def test_every_read_is_listed(trees):
    found = {name for name, tree in trees.items() if reads(tree)} - {*OPEN_NO_FILES}
    assert found == listed(READS, "What the package reads")


def test_every_port_is_listed(trees):
    assert {name for name, tree in trees.items() if listens(tree)} == listed(SECURITY, "Ports")


def test_nothing_that_is_read_is_run_but_stored_programs_and_configs(trees):
    assert {(name, *found) for name, tree in trees.items() for found in running(tree)} == MAY_RUN


def test_no_shell_is_asked(trees):
    for name, tree in trees.items():
        assert not [node for node, _ in calls(tree) if any(key.arg == "shell" for key in node.keywords)], name


def test_a_stored_program_is_unpickled_once_its_seal_holds(trees):
    """What `pickle.loads` is given comes from `SealedFiles.read`, and from nowhere else."""
    functions = dict(named(trees["runtime/programs/executables.py"], ast.FunctionDef))
    load = functions["_read"]
    assigned = [ast.unparse(node) for node in ast.walk(load) if isinstance(node, (ast.Assign, ast.NamedExpr))]
    assert [line for line in assigned if line.startswith("sealed")] == ["sealed = files.read(name)"]
    loads = [ast.unparse(node) for node, name in calls(load) if name == "loads"]
    assert loads == ["pickle.loads(sealed)"]
    assert [ast.unparse(own.annotation) for own in load.args.args if own.arg == "files"] == ["SealedFiles"]


def test_secrets_are_made_for_their_user_alone(trees):
    """With mode 0600, and never in the place of another file; everything else by the umask."""
    texts = {
        (name, ast.unparse(node))
        for name, tree in trees.items()
        for node, called in calls(tree)
        if called == "open" and "O_CREAT" in ast.unparse(node)
    }
    modes = {(name, "O_EXCL" in text, int(re.search(r", (\d+)[,)]", text)[1])) for name, text in texts}
    assert modes == {
        ("runtime/run/token.py", True, 0o600),
        ("runtime/programs/executables.py", True, 0o600),
        ("runtime/run/status_report.py", False, 0o644),
        ("runtime/run/status_report.py", False, 0o644),
        ("runtime/run/recorder.py", False, 0o644),
        ("runs/name_held.py", False, 0o644),
    }


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (reads, "from pathlib import Path\nPath('file').open('rb')"),
        (reads, "def f(p):\n    return p.read_text()"),
        (reads, "import os\nos.open('file', os.O_RDONLY)"),
        (listens, "import socket\nsocket.create_server(('', 0))"),
        (listens, "def f(s):\n    s.listen(1)"),
        (lambda tree: list(running(tree)), "import pickle\npickle.load(f)"),
        (lambda tree: list(running(tree)), "import numpy as np\nnp.load('x', allow_pickle=True)"),
        (lambda tree: list(running(tree)), "def f(x):\n    return eval(x)"),
    ],
)
def test_the_rules_notice(rule, source):
    assert rule(ast.parse(source))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (reads, "open('file', 'wb')"),
        (reads, "import os\nos.open('file', os.O_WRONLY | os.O_CREAT, 0o600)"),
        (listens, "listen('127.0.0.1')"),
        (lambda tree: list(running(tree)), "import pickle, re\npickle.dumps(1)\nre.compile('x')"),
    ],
)
def test_the_rules_let_through(rule, source):
    assert not rule(ast.parse(source))


def test_pickle_is_imported_where_it_is_used(trees):
    """Under its own name, so that the rules see it."""
    for name, tree in trees.items():
        taken = {one for one in (*imported(tree), *used(tree)) if one.split(".")[0] in {"pickle", "marshal"}}
        assert not taken or name == "runtime/programs/executables.py", taken
        assert not any(
            alias.asname
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name in {"pickle", "marshal", "importlib"}
        )


WALL_CLOCK = {
    "runtime/run/recorder.py": "read by others, perhaps after the machine was restarted",
    "runtime/run/exits.py": "held beside flight recorders",
    "launcher/rank_process.py": "the same; what is waited for goes by `monotonic`",
    "launcher/snapshot.py": "the same",
    "report/look.py": "the same, and beside times of files",
    "runs/lent_folder.py": "beside times of files",
    "runtime/programs/executables.py": "beside times of files",
    "runs/name_held.py": "a date for people",
    "runs/files.py": "the same",
    "commands/preflight/meeting.py": "compares the clocks of machines",
}
"""Who asks for the time of day, and why. It may be set meanwhile, so durations are never measured by it."""


@pytest.mark.slow(reason="5 s: it reads every call of the package")
def test_durations_are_not_measured_by_the_time_of_day(trees):
    asking = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if ast.unparse(node) in ("time.time", "time.strftime", "datetime.now", "datetime.datetime.now")
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and "time" in (a.name for a in node.names)
        )
    }
    assert asking == set(WALL_CLOCK)


MAY_PRINT = {"runtime/run/coordinator.py": "to the process that started it"}
"""Beside the commands, whose results must not be lost without a word."""


def test_runs_print_by_what_nobody_need_read(trees):
    """A run goes on though nobody reads any more; `printing.say` and `warn` see to that, `print` raises."""
    printing = {
        name
        for name, tree in trees.items()
        if not name.startswith("commands/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "print"
    }
    assert printing == set(MAY_PRINT)
