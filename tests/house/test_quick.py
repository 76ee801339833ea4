"""The plugins of `make test`: what is left out, and how long tests take."""

import json
import re
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from tests.support import quick
from tests.support.durations import changed, most, read
from tests.verification.mutation.table import mutants

MARKS = re.compile(r"pytest\.mark\.(?:slow|costly)\b(\(reason=\"[^\"]+\"\))?")


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


def test_named_tests_are_kept_with_all_their_cases_and_other_cases_as_they_were():
    names = [f"test_a[{i}]" for i in range(8)]
    own = items("train/test_auto.py", [*names, "test_b"], slow=True) + items(
        "train/test_auto.py", ["test_c[1]"]
    )
    kept, _ = quick.split(own, {own[3].nodeid, own[8].nodeid})
    assert [item.nodeid.partition("::")[2] for item in kept] == ["test_a[3]", "test_b", "test_c[1]"]
    kept, _ = quick.split(own, {own[0].nodeid.partition("[")[0]})
    assert len(kept) == 9 and own[8] not in kept


def test_no_test_that_the_table_of_mutants_names_is_left_out():
    """All of them, and by their files: collecting the whole suite takes long."""
    names = {name for mutant in mutants() for name in mutant.tests}
    assert names == quick.named() and len(names) > 30
    files = sorted({name.partition("::")[0] for name in names})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "-p", "tests.support.quick", "--quick", *files]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    kept = {line for line in said.splitlines() if "::" in line}
    kept |= {line.partition("[")[0] for line in kept}
    assert not names - kept


def test_which_cases_are_kept_does_not_depend_on_others():
    names = [f"test_a[{i}]" for i in range(4)]
    (kept,), _ = quick.split(items("train/test_auto.py", names))
    assert quick.case_number(kept) == min(zlib.crc32(f"{i}]".encode()) for i in range(4))


@pytest.mark.parametrize(("written", "expected"), [(300, 100), (30, 20), (10, 10)])
def test_fewer_examples_are_drawn(written, expected):
    drawn = []

    @hypothesis.settings(max_examples=written, database=None)
    @hypothesis.given(strategies.integers())
    def draws(number):
        drawn.append(number)

    quick.draw_fewer(draws)
    draws()
    assert len(drawn) == expected


def test_what_is_left_out_or_costly_has_a_reason():
    marked = {file: MARKS.findall(file.read_text()) for file in quick.TESTS.rglob("test_*.py")}
    assert sum(map(len, marked.values())) > 50
    assert [file for file, marks in marked.items() if not all(marks)] == []


def test_the_makefile_knows_all_files_with_tests_about_optimized_programs():
    marked = {file for file in quick.TESTS.rglob("test_*.py") if "mark.optimized" in file.read_text()}
    listed = re.search(
        r"OPTIMIZED := \$\(addprefix tests/,(.*?)\)", (ROOT / "Makefile").read_text(), re.DOTALL
    )
    names = listed[1].replace("\\", " ").split()
    assert {quick.TESTS / name for name in names} == marked - {Path(__file__)}


ROOT = Path(__file__).parents[2]


def test_durations_are_added_to_the_file(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import time\n\n\ndef test_a():\n    until = time.process_time() + 0.3\n"
        "    while time.process_time() < until: pass\n\n\ndef test_b(): pass\n"
    )
    file = tmp_path / "durations.json"
    file.write_text('{"test_old.py::test_c": [9.5, 9.0]}')
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
    assert set(found) == {"test_it.py::test_a", "test_it.py::test_b", "test_old.py::test_c"}
    assert all(0.2 <= seconds < 9.0 for seconds in found["test_it.py::test_a"])
    cpu = read(file)
    first, second, *_ = most(cpu)
    assert first.startswith("3 tests:") and "1 of over 5 s" in first and second.endswith("test_old.py")
    lines = [line.split() for line in changed(cpu, {"test_old.py::test_c": 3.0})]
    assert lines[1] == ["3.0", "9.0", "s", "test_old.py"] and lines[2][0] == "0.0"
