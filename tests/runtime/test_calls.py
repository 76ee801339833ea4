"""What the host does for the tasks of a warm step: it enters no mesh or context, and flattens no tree."""

import sys
from collections import Counter
from contextlib import contextmanager

import jax
import pytest

from rrfp_jax.runtime.engine.loop import StepExecution
from tests.support import toy


@contextmanager
def noted(found):
    """Count contexts that JAX or contextlib enters, and trees that are taken apart, by name."""

    def note(frame, event, arg):
        name = frame.f_code.co_qualname if event == "call" else getattr(arg, "__name__", "")
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if event in ("call", "c_call") and package in ("jax", "contextlib", "rrfp_jax"):
            found[name] += name.startswith("tree_") or name.endswith("__enter__")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def watched(method, found):
    def call(self):
        with noted(found):
            return method(self)

    return call


def test_a_task_enters_and_flattens_nothing(monkeypatch):
    trainer, found = toy.trainer(2), Counter()
    steps = [toy.microbatches(4, seed=seed) for seed in range(4)]
    for batch in steps[:-1]:
        trainer.step(batch)
    for name in ("_collect", "_fill"):
        monkeypatch.setattr(StepExecution, name, watched(getattr(StepExecution, name), found))
    trainer.step(steps[-1])
    assert "StepExecution._dispatch" in found, "tasks were dispatched meanwhile"
    assert not +found


def in_context(context):
    with context:
        pass


@pytest.mark.parametrize(
    "does",
    [
        lambda: jax.tree.leaves([1]),
        lambda: jax.tree.map(abs, [1]),
        lambda: in_context(jax.set_mesh(jax.make_mesh((1,), ("x",)))),
        lambda: in_context(jax.transfer_guard("allow")),
        lambda: in_context(jax.default_matmul_precision("highest")),
        lambda: jax.device_put(1.0),
    ],
    ids=["leaves", "map", "mesh", "guard", "precision", "device_put"],
)
def test_it_would_be_noticed(does):
    found = Counter()
    with noted(found):
        does()
    assert +found
