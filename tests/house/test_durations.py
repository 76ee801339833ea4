"""The plugin that writes how long tests took."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.durations import slowest

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
