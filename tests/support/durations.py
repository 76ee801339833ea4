"""A plugin that writes what each test took: `pytest -p tests.support.durations --durations-file=FILE`.

The file is JSON: by test id the seconds that passed and the seconds of CPU, of this process and of those that
it has started and waited for, set-up and tear-down included; a fixture that several tests share counts for
the first. Seconds of CPU are comparable on a busy machine. A later run adds to the file. Tests of over 5 s of
CPU that are marked neither `slow` nor `costly` are listed at the end. `python -m tests.support.durations
FILE` says which files and tests take most, and `FILE BEFORE` what changed by file.
"""

import collections
import json
import resource
import sys
import time
from pathlib import Path

import pytest

SLOW_SECONDS = 5.0
COLLECTING = "(collecting)"


def cpu_seconds():
    """Of this process, and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def pytest_addoption(parser):
    parser.addoption("--durations-file", type=Path, help="write what each test took")


def pytest_configure(config):
    file = config.getoption("--durations-file")
    if file is None:
        return
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(file.absolute()), "durations-file")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Measuring(config), "durations-cpu")


class Measuring:
    """Measures the CPU of tests in the process that runs them."""

    def __init__(self, config):
        self.config, self.begun, self.phases = config, 0.0, collections.Counter()

    def pytest_collection_finish(self):
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output[COLLECTING] = cpu_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        report.user_properties.append(("cpu", cpu_seconds() - self.begun))
        self.begun = cpu_seconds()
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self):
        self.begun = cpu_seconds()


class Durations:
    """Adds up the phases of each test; of workers, too, whose reports come here."""

    def __init__(self, file):
        self.file, self.slow = file, set()
        self.seconds, self.cpu = collections.Counter(), collections.Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        own = [value for name, value in report.user_properties if name == "cpu"]
        self.cpu[report.nodeid] += own[-1] if own else 0.0
        if "slow" in report.keywords or "costly" in report.keywords:
            self.slow.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        name = f"{COLLECTING}::{node.gateway.id}"
        self.cpu[name] = getattr(node, "workeroutput", {}).get(COLLECTING, 0.0)
        self.seconds[name] = self.cpu[name]

    def pytest_terminal_summary(self, terminalreporter):
        for test, seconds in self.cpu.most_common():
            if seconds > SLOW_SECONDS and test not in self.slow and "::" in test:
                terminalreporter.write_line(f"{seconds:.1f} s of CPU, marked neither slow nor costly: {test}")

    def pytest_sessionfinish(self):
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        found = before | {
            test: [round(seconds, 3), round(self.cpu[test], 3)] for test, seconds in self.seconds.items()
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(found, indent=0, sort_keys=True))


def by_file(cpu):
    """Seconds of CPU of each file."""
    files = collections.Counter()
    for test, own in cpu.items():
        files[test.partition("::")[0]] += own
    return files


def most(cpu, count=40):
    """Lines: the sum, files and tests that take most."""
    slow = [own for own in cpu.values() if own > SLOW_SECONDS]
    over = f"{len(slow)} of over {SLOW_SECONDS:g} s: {sum(slow):.0f}"
    yield f"{len(cpu)} tests: {sum(cpu.values()):.0f} s of CPU; {over}"
    for name, own in [*by_file(cpu).most_common(count), *collections.Counter(cpu).most_common(count)]:
        yield f"{own:8.1f} s  {name}"


def changed(cpu, before):
    """Lines: seconds of CPU by file, before and now."""
    now, then = by_file(cpu), by_file(before)
    yield f"{sum(then.values()):8.1f} {sum(now.values()):8.1f} s  all"
    for name in sorted({*now, *then}, key=lambda name: -max(now[name], then[name])):
        yield f"{then[name]:8.1f} {now[name]:8.1f} s  {name}"


def read(file):
    """Seconds of CPU by test."""
    return {test: cpu for test, (_, cpu) in json.loads(Path(file).read_text()).items()}


if __name__ == "__main__":
    files = [read(file) for file in sys.argv[1:]]
    print("\n".join(most(*files) if len(files) == 1 else changed(*files)))
