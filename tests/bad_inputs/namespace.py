"""What the expressions of the corpus see: our API with a small model, and a folder of odd files."""

import io
import json
import math
import os
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

import rrfp_jax as rrfp
import rrfp_jax.weights
from configs.quickstart import get_config
from rrfp_jax.commands.cli import run_verb
from rrfp_jax.commands.simulation import simulation_inputs
from rrfp_jax.commands.verbs import VERBS
from rrfp_jax.core.hints import BF
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import FORWARD, Placement, Task
from rrfp_jax.errors import REFUSED
from rrfp_jax.json_files import read_json
from rrfp_jax.loss_scale import LossScale
from rrfp_jax.report.store import read_steps
from rrfp_jax.report.timeline import Panel, Timeline
from rrfp_jax.runs.config import Checkpointing
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.run.exits import ExitReport
from rrfp_jax.runtime.run.join import Place, silence_seconds
from rrfp_jax.runtime.run.place import SlurmStep
from rrfp_jax.runtime.run.signals import save_seconds
from rrfp_jax.runtime.run.token import take_token
from rrfp_jax.trace.costs import constant
from rrfp_jax.trace.records import Part, RecordedStep, StepTrace, TaskRecord
from rrfp_jax.train.named import read_costs, read_schedule
from tests.support import toy
from tests.support.refusals import BATCH

ROOT = Path(__file__).parents[2]

data = rrfp.data
WORKLOAD = constant(2, 2, 1.0).as_json_object()
PLACED = {"RRFP_COORDINATOR": "host:9876", "RRFP_PROCESSES": "4", "RRFP_RANK": "0"}
STEP = {
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}


def corpus(**given):
    usual = {"source": data.Examples(["ab", "cd"], field=""), "tokenizer": data.Bytes(), "vocabulary": 256}
    return data.Corpus(**{**usual, **given})


def docs(**given):
    usual = {"corpus": corpus(), "lengths": (8, 16), "tokens": 64, "microbatches": 2}
    return data.Documents(**{**usual, **given})


def pictures(**given):
    usual = {
        "source": data.Examples(
            [{"text": "ab", "images": [np.zeros((28, 28), np.uint8)]}] * 2, images="images"
        )
    }
    return data.Corpus(
        **{**usual, "tokenizer": data.Bytes(), "vocabulary": 256, "patches": data.Patches(), **given}
    )


def q(**changes):
    """The quickstart's config with other fields."""
    return replace(get_config(), **changes)


def trainer(**given):
    return toy.trainer(1, **{"data": BATCH, **given})


@cache
def usual_trainer():
    """One for all expressions, never started."""
    return trainer()


def timeline():
    record = TaskRecord(0, Task(FORWARD, 0, 0), 0, 0.0, 0.0, 0.0, 1.0)
    trace = StepTrace(0, Placement(1), [Part.of([record])])
    rules = StepRules(placement=trace.placement, microbatches=1, schedule=BF())
    return Timeline([Panel("a step", RecordedStep(trace=trace, rules=rules, buckets=["a"]))])


def place(coordinator, processes, rank):
    return Place.of({"RRFP_COORDINATOR": coordinator, "RRFP_PROCESSES": processes, "RRFP_RANK": rank})


def slurm(**changes):
    return SlurmStep.of({**STEP, **changes})


def reader(name, read):
    """A function that reads what is given as the content of a file."""

    def content(text, encoding="utf-8"):
        Path(name).write_bytes(text.encode(encoding))
        return read(Path(name))

    return content


def read_workload(path):
    """The workload of a file, as `rrfp sim` and `rrfp.simulate` read it."""
    return simulation_inputs(path, 1, None, 1, 1)[0].actual


WORKLOADS = reader("bad.json", read_workload)
STEPS = reader("bad.msgpack", read_steps)


def tables(**changes):
    """A workload of one task, with other tables."""
    usual = {name: [[1]] for name in ("forward", "backward_input", "backward_weight")}
    return WORKLOADS(json.dumps(usual | changes))


def packed(tree):
    """A file of this as MessagePack."""
    return STEPS(msgspec.msgpack.encode(tree).decode("latin-1"), "latin-1")


def command(verb):
    """A command as a function of its arguments, which raises what it says when it refuses them."""

    def run(*arguments):
        said, shown = io.StringIO(), io.StringIO()
        with redirect_stderr(said), redirect_stdout(shown):
            status = run_verb(verb, arguments)
        if status == REFUSED:
            assert shown.getvalue() == "", "it refuses before it prints"
            raise rrfp.UsageError(said.getvalue().removesuffix("\n"))
        return status

    return run


def space():
    """The names of expressions."""
    return {
        **{name: getattr(rrfp, name) for name in ("data", "schedules", "simulate")},
        **{
            "rrfp": rrfp,
            "np": np,
            "Path": Path,
            "W": WORKLOAD,
            "BATCH": BATCH,
            "embed": toy.embed,
            "loss": toy.loss,
        },
        **{
            "corpus": corpus,
            "docs": docs,
            "pictures": pictures,
            "q": q,
            "trainer": trainer,
            "t": usual_trainer(),
        },
        **{"timeline": timeline(), "place": place, "slurm": slurm, "Place": Place},
        **{kind.__name__: kind for kind in (Checkpointing, Delays, LossScale, Settings)},
        **{f.__name__: f for f in (read_schedule, read_costs, read_steps, read_workload)},
        **{"save_seconds": save_seconds, "silence_seconds": silence_seconds, "take_token": take_token},
        **{name: command(verb) for name, verb in VERBS.items() if name != "compile"},
        "QUICK": f"--config={ROOT / 'configs' / 'quickstart.py'}",
        **{"nan": math.nan, "inf": math.inf, "tables": tables, "packed": packed},
        "workload": WORKLOADS,
        "costs": reader("bad.json", lambda path: read_costs(path, str(path))),
        "order": reader("bad.csv", lambda path: read_schedule(f"csv:{path}")),
        "steps": STEPS,
        "last_words": reader("bad.json", lambda path: read_json(path, ExitReport)),
    }


def fill(folder):
    """Odd files."""
    texts = {
        "short.txt": "a few words",
        "private.txt": "a few words",
        "empty.txt": "",
        "script.py": "",
        "empty.py": "",
        "raises.py": "1 / 0",
        "syntax.py": "def get_config(:",
        "exits.py": "import sys\nsys.exit(0)",
        "deep.py": "def get_config():\n    return get_config()",
        "nothing.py": "def get_config():\n    pass",
        "garbage.jsonl": "{\n",
        "deep.jsonl": "[" * 100_000 + "\n",
        "nofield.jsonl": '{"words": "a"}\n',
        "ragged.jsonl": '{"text": [[1], [1, 2]]}\n',
        "huge.jsonl": f'{{"text": [{10**30}, 1, 2]}}\n',
        "garbage.npy": "no array",
        "garbage.safetensors": "no tensors",
        "empty.npy": "",
        "raw.bin": "abcdefgh",
        "w.json": json.dumps(WORKLOAD),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "short.txt").chmod(0o644)
    (folder / "private.txt").chmod(0o600)
    (folder / "binary.py").write_bytes(b"\xff\0")
    (folder / "binary.jsonl").write_bytes(b'{"text": "\xff"}\n')
    tokens = np.arange(10, dtype=np.int64)
    arrays = {
        "good": tokens,
        "floats": np.ones(3),
        "matrix": np.ones((2, 2), np.int32),
        "bad-offsets": tokens,
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.save(folder / "objects.npy", np.array([[], 1], object), allow_pickle=True)
    for name in ("good", "objects", "floats", "matrix", "garbage", "empty", "zip", "pipe", "header"):
        np.save(folder / f"{name}.offsets.npy", np.array([0, 1]))
    np.save(folder / "bad-offsets.offsets.npy", np.array([0, 7, 3]))
    (folder / "header.npy").write_bytes((folder / "good.npy").read_bytes().replace(b"(10,)", b"(10**"))
    with zipfile.ZipFile(folder / "zip.npy", "w") as archive:
        archive.writestr("a", "b")
    for name in ("pipe", "pipe.npy", "pipe.safetensors"):
        os.mkfifo(folder / name)
