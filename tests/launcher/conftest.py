"""Processes of a test are known by an argument, and none outlives it."""

import threading
import time
import uuid
from contextlib import suppress

import psutil
import pytest

LIMIT_SECONDS = 45.0


def processes(marker):
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        arguments = process.info["cmdline"] or []
        if marker in arguments and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def until(condition, seconds=30.0):
    """Wait for a condition; whether it came true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


@pytest.fixture
def marker():
    """An argument by which all of a test's processes are known; it fails if any is left or takes long."""
    marker = uuid.uuid4().hex
    late = []

    def give_up():
        late.extend(processes(marker))
        for process in late:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    limit = threading.Timer(LIMIT_SECONDS, give_up)
    limit.start()
    yield marker
    limit.cancel()
    left = not until(lambda: not processes(marker), 2.0)
    give_up()
    assert not left and not late
