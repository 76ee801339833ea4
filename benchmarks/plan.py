"""What `rrfp plan` costs for published models, and how its step time for the quickstart compares."""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax

from benchmarks.harness import REPOSITORY, Aim, Found, bench, output_of, say
from configs.gpt3_large import get_config as gpt3_config
from configs.quickstart import get_config as quickstart_config
from rrfp_jax import RunConfig
from rrfp_jax.forecast.cost_analysis import program_cost
from rrfp_jax.runtime.programs.segments import SegmentShape
from rrfp_jax.runtime.sizes import temporary_bytes

DECODERS = ("gpt3_large", "qwen3_4b", "llama3_70b", "mixtral_8x7b")
WITH_ENCODER = ("qwen3_4b_vit_bigg", "llama3_8b_vit_5b", "qwen3_32b_internvit_6b", "llama3_70b_vit_22b")
SECONDS, GIB = 60, 8
SHORT, LONG, FIRST = 10, 50, 5
"""Steps of the two runs of the quickstart, and those at the beginning that are not counted."""

PLAN = [sys.executable, "-m", "rrfp_jax", "plan"]
LIMIT = 600.0


def cost_of_planning(name: str) -> dict[str, Any]:
    """Seconds and GiB of one call, and what it predicts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [*PLAN, f"--config=configs/{name}.py", "--card=h100", f"--json={file}"]
        began = perf_counter()
        child = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)  # whose usage is the child's alone
        taken = perf_counter() - began
        if status:
            raise RuntimeError(f"{' '.join(command)} failed")
        suggested = json.loads(file.read_text(encoding="utf-8"))["suggested"]
    return {
        "seconds": taken,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "gib": usage.ru_maxrss / 2**20,
        "predicted_step_seconds": suggested["step_seconds"],
        "split": suggested["split"],
        "does_not_fit": suggested["does_not_fit"],
        "peak_gib": max(stage["peak_bytes"] for stage in suggested["stages"]) / 2**30,
    }


def stages_of_encoder(name: str, split: list[int]) -> str:
    """How many stages have layers of the encoder or the projector behind it, such as "1.8 of 8"."""
    left = importlib.import_module(f"configs.{name}").get_config().model.encoder.n_layers + 2
    stages = 0.0
    for layers in split:
        stages += min(left, layers) / layers
        left = max(0, left - layers)
    return f"{stages:.1f} of {len(split)}"


def counted_over_compiled(config: RunConfig) -> dict[str, dict[str, float]]:
    """For embedding, a block and the head, by program."""
    pipe = config.pipeline()
    fields = config.train_data().plan(0)[0].fields
    shapes = pipe.shapes(fields)
    ratios = {}
    for i in (0, 1, len(pipe) - 1):
        shape = SegmentShape(pipe=pipe, layers=range(i, i + 1), fields=fields, shapes=shapes)
        traced = shape.traced()
        for name in ("forward", "backward", "weight"):
            program = getattr(traced, name)
            counted = program_cost(program.closed)
            compiled = jax.jit(program.__call__).lower(*program.specs).compile()
            moved, held = (compiled.cost_analysis() or {})["bytes accessed"], temporary_bytes(compiled)
            ratios[f"{pipe.layers[i].name} {name}"] = {
                "bytes": counted.bytes / moved,
                "temporaries": counted.temp_size_in_bytes / held if held else 1.0,
                "temporary_mib": held / 2**20,
            }
    return ratios


def predicted_step() -> float:
    """Of the quickstart on this machine (s)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        output_of([*PLAN, "--config=configs/quickstart.py", "--card=measured", f"--json={file}"], LIMIT)
        return float(json.loads(file.read_text(encoding="utf-8"))["own"]["step_seconds"])


def real_steps(steps: int) -> tuple[list[float], float]:
    """Seconds of each step of the quickstart in 4 processes; CPU seconds of all of them in all."""
    before = _cpu_of_children()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rrfp_jax", "launch", "--config=configs/quickstart.py"]
        text = Path(json.__file__).parent  # little of it, or validation would take most of the run
        given = {"steps": steps, "directory": folder, "path": text}
        output_of([*command, *(f"--config.{name}={value}" for name, value in given.items())], LIMIT)
        lines = (Path(folder) / "quickstart" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["step_seconds"] for line in lines], _cpu_of_children() - before


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def quickstart() -> dict[str, float]:
    """The predicted step and the real one (s)."""
    before = predicted_step()
    _, short = real_steps(SHORT)
    steps, long = real_steps(LONG)
    after = predicted_step()
    return {
        "predicted_before": before,
        "predicted_after": after,
        "median": median(steps[FIRST:]),
        "fastest": min(steps[FIRST:]),
        "cpu_by_cores": (long - short) / (LONG - SHORT) / len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[1],
    }


@bench(
    "What does `rrfp plan` cost for published models, and how close is it?",
    minutes="5 *, 2 with --quick",
    aims=f"{SECONDS} s and {GIB} GiB for each model",
)
def plan(quick: bool = False, models: tuple[str, ...] = (*DECODERS, *WITH_ENCODER)) -> Found:
    """Part 1, all of `--quick`: time and largest resident size of the command for each model, in a process of
    its own; and the stages that get an encoder's layers, if it has one.

    Part 2: bytes moved and temporaries of the programs of single layers, counted without compiling, over what
    XLA says of the same programs compiled for CPU.

    Part 3: the quickstart as `make train` runs it, 4 processes that share this machine's cores. Predicted
    with `--card=measured`, once before and once after the run: no step is shorter than the stages' compute
    divided by the cores. Real: the median and the fastest step after the first ones; and the processes' own
    CPU time of a step divided by the cores, which others on the machine do not lengthen (from two runs of
    different length)."""
    figures: dict[str, Any] = {"models": {}}
    aims = []
    for name in models:
        found = figures["models"][name] = cost_of_planning(name)
        if name in WITH_ENCODER:
            found["encoder"] = stages_of_encoder(name, found["split"])
        say(f"{name}: {found}")
        aims.append(Aim(f"rrfp plan on {name}", found["seconds"], SECONDS, "s"))
        aims.append(Aim(f"rrfp plan on {name}, resident", found["gib"], GIB, "GiB"))
    for config in () if quick else (quickstart_config(), gpt3_config()):
        ratios = figures[f"{config.name}, counted over compiled"] = counted_over_compiled(config)
        for name, ratio in ratios.items():
            say(f"{config.name}, {name}, counted over compiled: {ratio}")
    if not quick:
        found = figures["quickstart"] = quickstart()
        predicted = (found["predicted_before"] + found["predicted_after"]) / 2
        for what in ("median", "fastest", "cpu_by_cores"):
            real = found[what]
            say(f"quickstart, {what}: {real * 1e3:.0f} ms; predicted / real = {predicted / real:.2f}")
    return Found(figures, aims)
