"""A plugin that writes how long each test took: `pytest -p tests.support.durations --durations-file=FILE`.

The file is JSON: seconds by test id, set-up and tear-down included; a fixture that several tests share counts
for the first. A later run adds to it. Tests of over 5 s that are not marked `slow` are listed at the end.
`python -m tests.support.durations FILE` says which files and tests take longest.
"""

import collections
import json
import sys
from pathlib import Path

SLOW_SECONDS = 5.0


def pytest_addoption(parser):
    parser.addoption("--durations-file", type=Path, help="write how long each test took")


def pytest_configure(config):
    file = config.getoption("--durations-file")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(file.absolute()), "durations-file")


class Durations:
    """Adds up the phases of each test; of workers, too, whose reports come here."""

    def __init__(self, file):
        self.file, self.seconds, self.slow = file, collections.Counter(), set()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if "slow" in report.keywords:
            self.slow.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter):
        for test, seconds in self.seconds.most_common():
            if seconds > SLOW_SECONDS and test not in self.slow:
                terminalreporter.write_line(f"{seconds:.1f} s, not marked slow: {test}")

    def pytest_sessionfinish(self):
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        found = before | {test: round(seconds, 3) for test, seconds in self.seconds.items()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(found, indent=0, sort_keys=True))


def slowest(seconds, most=30):
    """Lines: the sum, files and tests that take longest, and the share of what is slow."""
    files = collections.Counter()
    for test, own in seconds.items():
        files[test.partition("::")[0]] += own
    total = sum(seconds.values())
    slow = [own for own in seconds.values() if own > SLOW_SECONDS]
    yield f"{len(seconds)} tests: {total:.0f} s; {len(slow)} of over {SLOW_SECONDS:g} s: {sum(slow):.0f}"
    for name, own in [*files.most_common(most), *collections.Counter(seconds).most_common(most)]:
        yield f"{own:8.1f} s  {name}"


if __name__ == "__main__":
    print("\n".join(slowest(json.loads(Path(sys.argv[1]).read_text()))))
