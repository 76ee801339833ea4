"""What a run and a Trainer leave behind, and what is made of it: of one's own, or of an older checkout's.

`left/` is written once and never changed. It is copied before it is read: from the older checkout's folder if
there is one. So what the old code wrote is resumed, reported and exported by the new.
"""

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np

import rrfp_jax as rrfp
from tests.golden.losses import trainer
from tests.support import zoo
from tests.support.commands import report, train
from tests.support.quickstart import arguments, with_texts

SAVED_AT, STEPS = 20, 40
RUN = {"path": "text.txt", "directory": "runs", "checkpoint.every_steps": 3}
CASES = {
    "tied": {"model": "tied", "pp": 4, "clip_norm": 0.3, "loss_scale": "dynamic"},
    "zoo": {"model": "zoo, frozen and tied", "schedule": "bfw"},
    "dp": {"dp": 2, "shard_optimizer": True},
}
BY_CHANCE = ".traceEvents[].args."
"""Keys of a trace that are there or not, as the step went."""

ELSEWHERE = {"tied": {"pp": 2, "schedule": "bfw"}, "zoo": {"pp": 1}, "dp": {"pp": 4, "dp": 1}}
"""Another mesh and schedule that each case is resumed on, besides its own."""


@contextlib.contextmanager
def inside(folder):
    """A folder as the working one; what is printed is kept."""
    before, said = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield said
    finally:
        os.chdir(before)


def run(steps):
    """The tiny quickstart up to a step; resumed, if it has been there."""
    status = train(arguments(Path(), steps=steps, **RUN))
    assert status == 0, status


def left(given):
    """Write a run's folder, and checkpoints of trainers; the files of each."""
    folder = given.folder / "left"
    folder.mkdir()
    with_texts(folder)
    with inside(folder):
        run(6)
        for name, case in CASES.items():
            own, _ = trainer(**case)
            list(own.steps(SAVED_AT))
            own.save(folder / name)
    return {one.name: names(one) for one in sorted(folder.iterdir()) if one.is_dir()}


def keys_of_files(given):
    """The keys of what was left, by file, with the types of their values."""
    return dict(every_key(given.folder / "left"))


def names(folder):
    """Files below a folder; random parts of their names left out."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted({re.sub(r"[0-9a-f]{16,}", "<hash>", name) for name in files})


def every_key(folder):
    """The keys of every JSON file, with the types of their values."""
    for path in sorted([*folder.rglob("*.json"), *folder.rglob("*.jsonl")]):
        with contextlib.suppress(ValueError):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            every = {key for line in lines for key in keys(json.loads(line))}
            found = sorted(key for key in every if not key.startswith(BY_CHANCE))
            yield re.sub(r"[0-9a-f]{16,}", "<hash>", path.relative_to(folder).as_posix()), found


def keys(value, where=""):
    """Paths of all values, and their types; elements of lists share one."""
    if isinstance(value, dict):
        return [found for key, own in value.items() for found in keys(own, f"{where}.{key}")]
    if isinstance(value, list):
        return [found for own in value for found in keys(own, f"{where}[]")]
    kind = (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )
    return [f"{where}: {kind}"]


def copied(given, name):
    """A copy of what was left, by the older checkout if there is one."""
    target = given.folder / name
    shutil.copytree((given.before or given.folder) / "left", target)
    return target


def resumed(given):
    """Losses after resuming, to the bit: of the run, and of each trainer, here and on another mesh."""
    folder, found = copied(given, "resumed"), {}
    with inside(folder):
        run(10)
        lines = (folder / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
        found["run"] = [[line["step"], line["loss"]] for line in map(json.loads, lines)]
        for name, case in CASES.items():
            for way, changes in (("as it was", {}), ("elsewhere", ELSEWHERE[name])):
                own, _ = trainer(**{**case, **changes})
                assert own.restore(folder / name)
                losses = [r.loss.hex() for r in own.steps(STEPS - SAVED_AT)]
                found[f"{name}, {way}"] = {"from": SAVED_AT, "losses": losses}
    return found


def read(given):
    """A report of the run, and what is exported from checkpoints."""
    folder = copied(given, "read")
    with inside(folder):
        before = names(folder)
        status = report(["runs/quickstart"])
        new = sorted({*names(folder)} - {*before})
        exported = zoo.digest(
            jax.tree.map(np.asarray, rrfp.export(folder / "runs" / "quickstart.checkpoints"))
        )
    return {"report": {"status": status, "files": new}, "exported": exported}


TABLE = {"left": left, "keys": keys_of_files, "resumed": resumed, "read": read}
