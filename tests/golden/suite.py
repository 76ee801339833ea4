"""The tests: their ids, how many assertions each file has, and how long they took, if a file says so."""

import ast
import collections
import json
import subprocess
import sys

from tests.golden.checkout import ROOT

DURATIONS = ROOT / ".pytest_cache" / "durations.json"
"""Written by `pytest --write-durations=FILE`; see tests/support/durations.py."""


def ids(given):
    """By file, the ids of all tests."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = {}
    for line in done.stdout.splitlines():
        file, separator, test = line.partition("::")
        if separator and file.endswith(".py"):
            found.setdefault(file, []).append(test)
    return {file: sorted(tests) for file, tests in found.items()}


def assertions(given):
    """By file below tests/, how many assertions there are: `assert`, and calls that raise if one fails."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        count = counted(ast.parse(path.read_text(encoding="utf-8")))
        if count:
            found[path.relative_to(ROOT).as_posix()] = count
    return found


CHECKS = ("raises", "warns", "fail", "refused")


def counted(tree):
    """Assertions of a module."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = [f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls]
    checks = sum(name in CHECKS or name.startswith("assert_") for name in names)
    return checks + sum(isinstance(node, ast.Assert) for node in ast.walk(tree))


def durations(given):
    """Seconds of all tests together and of the slowest files; for reading, never compared."""
    if not DURATIONS.exists():
        return {"all": None}
    by_file = collections.Counter()
    for test, seconds in json.loads(DURATIONS.read_text()).items():
        by_file[test.partition("::")[0]] += seconds
    return {"all": round(by_file.total()), **{file: round(s) for file, s in by_file.most_common(10)}}


TABLE = {"ids": ids, "assertions": assertions, "durations": durations}
