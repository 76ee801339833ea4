"""A plugin for `make test`: leaves out slow tests, and most cases of tests that compile or start something.

`--quick` deselects tests marked `slow`. A parametrised test of the folders and files below keeps one case of
so many, at least one. Which ones depends on their ids alone, so tests that share a fixture keep the same.
`make test-all` runs everything.
"""

import zlib
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]

KEPT_OF = {
    **{"attacks": 3, "checkpoint": 4, "commands/test_compile.py": 2, "data/test_loading.py": 4},
    **{"data/test_user_data.py": 6, "docs/test_blocks.py": 4, "launcher": 6, "models": 3, "odd_models": 10},
    **{"runs": 3, "runtime": 8, "train": 8},
}
"""By folder or file below tests/, of how many cases one is kept."""


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out slow tests, and most cases of others")


def pytest_collection_modifyitems(config, items):
    """Deselect what `--quick` leaves out."""
    if not config.getoption("--quick"):
        return
    kept, left_out = split(items)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def split(items):
    """The tests that are kept, in their order, and those that are left out."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            name = item.nodeid.partition("[")[0]
            cases[name].append(item)
    kept = set()
    for own in cases.values():
        share = share_of(own[0].path)
        count = -(-len(own) // share)
        kept.update(sorted(own, key=case_number)[:count])
    return [item for item in items if item in kept], [item for item in items if item not in kept]


def share_of(path):
    """Of how many cases of a file's tests one is kept."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return max((share for begin, share in KEPT_OF.items() if name.startswith(begin)), default=1)


def case_number(item):
    """A number that follows from a case's id, the same for all tests that have this case."""
    return zlib.crc32(item.nodeid.partition("[")[2].encode())
