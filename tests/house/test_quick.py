"""The plugins of `make test`: what is left out, and how long tests take."""

import json
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import quick
from tests.support.durations import slowest


@dataclass(frozen=True)
class Item:
    nodeid: str
    path: Path
    slow: bool = False

    def get_closest_marker(self, name):
        return (name == "slow" and self.slow) or None


def items(name, cases, slow=False):
    return [Item(f"tests/{name}::{case}", quick.TESTS / name, slow) for case in cases]


def test_every_folder_and_file_of_the_table_is_there():
    assert all((quick.TESTS / name).exists() for name in quick.KEPT_OF)


@pytest.mark.parametrize(("file", "count"), [("core/test_core.py", 8), ("train/test_auto.py", 1)])
def test_slow_tests_and_most_cases_are_left_out(file, count):
    one, other = (items(file, [f"{name}[{i}]" for i in range(8)]) for name in ("test_a", "test_b"))
    alone, slow = items(file, ["test_c"]), items(file, ["test_d"], slow=True)
    kept, left_out = quick.split([*one, *other, *alone, *slow])
    assert len(kept) == 2 * count + 1 and set(slow) <= set(left_out) and alone[0] in kept
    cases = [
        [item.nodeid.partition("[")[2] for item in kept if f"test_{name}[" in item.nodeid] for name in "ab"
    ]
    assert cases[0] == cases[1]  # the same, as they may share what a fixture made of them


def test_which_cases_are_kept_does_not_depend_on_others():
    names = [f"test_a[{i}]" for i in range(4)]
    (kept,), _ = quick.split(items("train/test_auto.py", names))
    assert quick.case_number(kept) == min(zlib.crc32(f"{i}]".encode()) for i in range(4))


ROOT = Path(__file__).parents[2]


def test_durations_are_added_to_the_file(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import time\n\n\ndef test_a():\n    time.sleep(0.2)\n\n\ndef test_b(): pass\n"
    )
    file = tmp_path / "durations.json"
    file.write_text('{"test_old.py::test_c": 9.0}')
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.support.durations",
            f"--durations-file={file}",
            ".",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=True,
        capture_output=True,
    )
    found = json.loads(file.read_text())
    assert 0.2 <= found["test_it.py::test_a"] < 9.0 and "test_it.py::test_b" in found
    first, second, *_ = slowest(found)
    assert first.startswith("3 tests:") and "1 of over 5 s" in first and second.endswith("test_old.py")
