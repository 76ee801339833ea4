"""A plugin for `make test`: leaves out slow tests, and most cases of tests that compile or start something.

`--quick` deselects tests marked `slow`. A parametrised test of the folders and files below keeps one case of
so many, at least one. Which ones depends on their ids alone, so tests that share a fixture keep the same.
Tests that the table of mutants names are kept in any case. `make test-all` runs everything.
`python -m tests.support.quick` lists what `make test` leaves out.
"""

import re
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from functools import cache
from pathlib import Path

from hypothesis import settings

TESTS = Path(__file__).parents[1]
MUTANTS = TESTS / "verification" / "bugs.md"

KEPT_OF = {
    **{"attacks": 3, "bad_inputs": 4, "checkpoint": 6, "commands/test_compile.py": 2},
    **{"commands/test_plan.py": 4, "core/test_explore.py": 4, "core/test_idleness.py": 2},
    **{"first_day": 3, "data/test_documents.py": 4, "data/test_loading.py": 4, "data/test_user_data.py": 6},
    **{"docs/test_blocks.py": 4, "house/test_mutants.py": 4, "launcher": 6, "models": 3, "odd_models": 40},
    **{"nodes/test_nodes.py": 3, "report": 4, "runs": 3, "runtime": 8, "runtime/test_segments.py": 9},
    **{"runtime/test_sharding.py": 12, "sim": 4, "train": 8},
}
"""By folder or file below tests/, of how many cases one is kept."""

EXAMPLES_OF, FEWEST = 3, 20
"""Of how many examples of hypothesis one is drawn, but for this many at least."""


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out slow tests, and most cases of others")
    parser.addoption("--quick-file", type=Path, help="where to write the names of what is left out")


def pytest_collection_modifyitems(config, items):
    """Deselect what `--quick` leaves out."""
    if not config.getoption("--quick"):
        return
    kept, left_out = split(items, named())
    for item in kept:
        if not is_named(item.nodeid, named()):
            draw_fewer(item.obj)
    if (file := config.getoption("--quick-file")) is not None:
        file.write_text("".join(f"{item.nodeid}\n" for item in left_out))
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@cache
def named():
    """The tests that the table of mutants names: ids of cases, of functions or of files."""
    return frozenset(re.findall(r"`(tests/[\w/]+\.py[^`]*)`", MUTANTS.read_text()))


def is_named(nodeid, names):
    """Whether a test, or the test of which it is a case, is among the names."""
    return nodeid in names or nodeid.partition("[")[0] in names


def draw_fewer(test):
    """Have a test draw fewer examples, if it draws any."""
    test = getattr(test, "__func__", test)
    if (own := getattr(test, "_hypothesis_internal_use_settings", None)) is not None:
        count = min(own.max_examples, max(FEWEST, own.max_examples // EXAMPLES_OF))
        test._hypothesis_internal_use_settings = settings(own, max_examples=count)


def split(items, names=frozenset()):
    """The tests that are kept, in their order, and those that are left out."""
    kept = {item for item in items if is_named(item.nodeid, names)}
    cases = defaultdict(list)
    for item in items:
        if item in kept or item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for own in cases.values():
        count = -(-len(own) // share_of(own[0].path))
        kept.update(sorted(own, key=lambda item: (item not in kept, case_number(item)))[:count])
    return [item for item in items if item in kept], [item for item in items if item not in kept]


def share_of(path):
    """Of how many cases of a file's tests one is kept."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return max((share for begin, share in KEPT_OF.items() if name.startswith(begin)), default=1)


def case_number(item):
    """A number that follows from a case's id, the same for all tests that have this case."""
    return zlib.crc32(item.nodeid.partition("[")[2].encode())


def left_out():
    """The ids of the tests that `make test` leaves out, as pytest collects them now."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "left_out"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-qq",
            "-p",
            "tests.support.quick",
            "--quick",
        ]
        command += ["-p", "no:cacheprovider", f"--quick-file={file}"]
        subprocess.run(command, cwd=TESTS.parent, check=True, stdout=subprocess.DEVNULL)
        return file.read_text().splitlines()


if __name__ == "__main__":
    print("\n".join(left_out()))
