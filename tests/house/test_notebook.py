"""The notebook, run by Jupyter as a user would run it, then interrupted and run again."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.kept import with_cache
from tests.support.notebook import NOTEBOOK, NUMBER, TIMES, client_of, environment, outputs_of, timeless

LIMIT_SECONDS = 300
"""For everything together; it takes about a minute on two free cores."""

RESOURCES = """
import gc, json, os, threading, psutil
gc.collect()
process = psutil.Process()
print(json.dumps({
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "os threads": process.num_threads(),
    "files": process.num_fds(),
    "sockets": len(process.net_connections("all")),
}))
"""


class Kernel:
    """The notebook's kernel: `run` runs code in it, `interrupt_after` prints sends a KeyboardInterrupt."""

    def __init__(self, manager, deadline):
        self.manager, self.deadline = manager, deadline
        self.client = manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code, interrupt_after=None):
        """What the code printed, and the name of the error that ended it or None."""
        printed = []

        def listen(message):
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
                if len(printed) == interrupt_after:
                    self.manager.interrupt_kernel()

        left = self.deadline - time.monotonic()
        reply = self.client.execute_interactive(code, timeout=left, output_hook=listen)["content"]
        print(*reply.get("traceback", []), sep="\n")  # pytest shows it if the test fails
        return "".join(printed), reply.get("ename")

    def resources(self):
        printed, error = self.run(RESOURCES)
        assert error is None, printed
        return json.loads(printed)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook with its outputs, and its kernel."""
    folder = tmp_path_factory.mktemp("notebook")
    deadline = time.monotonic() + LIMIT_SECONDS
    client = client_of(folder, lambda cell: max(1, int(deadline - time.monotonic())))
    manager = client.km
    try:
        notebook = client.execute(cleanup_kc=False, env=with_cache(environment(folder)))
        kernel = Kernel(manager, deadline)
        yield {cell.id: cell for cell in notebook.cells}, kernel, folder
        kernel.client.stop_channels()
    finally:
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


def results(cell, kind):
    """The outputs of a cell of one MIME type."""
    return [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]


def stored():
    """The code cells as they are in the repository."""
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_is_stored_with_outputs_and_nothing_of_a_machine():
    import nbformat

    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))
    for cell in stored():
        assert (cell.metadata, cell.execution_count) == ({}, None)
    assert sum(bool(cell.outputs) for cell in stored()) >= 7


def text_of(output):
    return output.get("text") or output["data"].get("text/plain", "")


@pytest.mark.slow(reason="35 s: it runs a notebook that trains")
def test_its_stored_outputs_are_those_of_today(executed):
    """But for times, and for decimals where machines round differently: python -m tests.support.notebook."""
    for cell in stored():
        found = outputs_of(executed[0][cell.id])
        assert [list(own.get("data", ["text"])) for own in cell.outputs] == [
            list(own.get("data", ["text"])) for own in found
        ], cell.id
        for kept, own in zip(map(text_of, cell.outputs), map(text_of, found), strict=True):
            assert timeless(kept) == timeless(own), cell.id
            before, now = (
                [float(n.strip("%")) for n in NUMBER.findall(TIMES.sub("", t))] for t in (kept, own)
            )
            assert now == pytest.approx(before, rel=0.2, abs=0.05), cell.id


@pytest.mark.slow(reason="it runs a notebook")
def test_runs_in_this_interpreter(executed):
    _, kernel, _ = executed
    assert Path(kernel.run("import sys; print(sys.prefix)")[0].strip()).samefile(sys.prefix)


@pytest.mark.slow(reason="35 s: it runs a notebook that trains")
@pytest.mark.parametrize("cell", ["timeline", "train-bf"])
def test_draws_a_timeline(executed, cell):
    (picture,) = results(executed[0][cell], "text/html")
    assert picture.startswith("<svg")
    assert all(text in picture for text in ("stage 3", "F7 on stage 0", "B7 on stage 3"))


@pytest.mark.slow(reason="35 s: it runs a notebook that trains")
def test_learns(executed):
    losses, _ = executed[1].run("print([report.loss for report in reports])")
    losses = json.loads(losses)
    assert losses[0] > 3
    assert losses[-1] < 0.2


@pytest.mark.slow(reason="35 s: it runs a notebook that trains")
def test_shows_that_it_is_right(executed):
    cells, _, folder = executed
    assert results(cells["equal"], "text/plain") == ["True"]
    assert results(cells["check"], "text/plain") == ["True"]
    assert json.loads((folder / "runs" / "quickstart-trace.json").read_text())["traceEvents"]


@pytest.mark.slow(reason="35 s: it trains until the model counts")
def test_its_model_counts_on_by_itself(executed):
    numbers, _ = executed[1].run("print(greedy(modules, [[0, 3], [30, 31], [5, 10]], 8).tolist())")
    counted = [[(start + stride * i) % 32 for i in range(10)] for start, stride in ((0, 3), (30, 1), (5, 5))]
    assert (np.array(json.loads(numbers)) == counted).mean() > 0.9


@pytest.mark.slow(reason="it runs a notebook twice")
def test_interrupted_and_run_again_leaves_nothing_behind(executed):
    cells, kernel, _ = executed
    train = cells["train"].source
    assert kernel.run(train)[1] is None
    before = kernel.resources()
    assert kernel.run(train, interrupt_after=2)[1] == "KeyboardInterrupt"
    assert kernel.run(train)[1] is None
    for _ in range(15):
        assert kernel.run("for report in trainer.steps(500): print(report)", 1)[1] == "KeyboardInterrupt"
    assert kernel.run("print(len(list(trainer.steps(2))))") == ("2\n", None)
    after = kernel.resources()
    assert after["threads"] == before["threads"]
    assert all(after[name] <= before[name] for name in ("os threads", "files", "sockets")), (before, after)
