"""What `rrfp-plan` costs for published decoders, and how its step time for the quickstart compares.

    python -m benchmarks.runtime.plan [--json=FILE] [--check]

Part 1: time and largest resident size of the command for each decoder, in a process of its own.
Part 2: bytes moved and temporaries of the programs of single layers, counted without compiling, over what XLA
says of the same programs compiled for CPU.
Part 3: the quickstart as `make train` runs it, 4 processes that share this machine's cores. Predicted with
`--card=measured`, once before and once after the run: no step is shorter than the stages' compute divided by
the cores. Real: the median and the fastest step after the first ones; and the processes' own CPU time of a
step divided by the cores, which others on the machine do not lengthen (from two runs of different length).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from benchmarks.harness import REPOSITORY, Aim, finish, output_of, parse
from configs.gpt3_large import get_config as gpt3_config
from configs.quickstart import get_config as quickstart_config
from rrfp_jax import RunConfig
from rrfp_jax.forecast.cost_analysis import program_cost
from rrfp_jax.runtime.autodiff.differentiate import differentiate
from rrfp_jax.runtime.programs.virtual_stage import VirtualStageShape
from rrfp_jax.runtime.sizes import temporary_bytes

DECODERS = ("gpt3_large", "qwen3_4b", "llama3_70b")
SECONDS, GIB = 60, 8
SHORT, LONG, FIRST = 10, 50, 5
"""Steps of the two runs of the quickstart, and those at the beginning that are not counted."""

PLAN = [sys.executable, "-m", "rrfp_jax.commands.plan"]
LIMIT = 600.0


def cost_of_planning(name: str) -> dict[str, float]:
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
    }


def counted_over_compiled(config: RunConfig) -> dict[str, dict[str, float]]:
    """For embedding, a block and the head, by program."""
    pipe = config.pipeline()
    fields = config.train_data().plan(0)[0].fields
    shapes = pipe.shapes(fields)
    ratios = {}
    for i in (0, 1, len(pipe) - 1):
        shape = VirtualStageShape(pipe=pipe, layers=range(i, i + 1), fields=fields, shapes=shapes)
        traced = differentiate(shape.flat, *shape.specs())
        for name in ("forward", "backward", "weight"):
            program = getattr(traced, name)
            counted = program_cost(program.closed)
            compiled = jax.jit(program.__call__).lower(*program.specs).compile()
            moved, held = (compiled.cost_analysis() or {})["bytes accessed"], temporary_bytes(compiled)
            ratios[f"{pipe.layers[i].name} {name}"] = {
                "bytes": counted.bytes / moved,
                "temporaries": counted.temporary_bytes / held if held else 1.0,
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
        command = [sys.executable, "-m", "launch.local", "--config=configs/quickstart.py"]
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
        "median": statistics.median(steps[FIRST:]),
        "fastest": min(steps[FIRST:]),
        "cpu_by_cores": (long - short) / (LONG - SHORT) / len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[1],
    }


def main() -> int:
    """Measure, print, write."""
    options = parse(__doc__).parse_args()
    figures: dict[str, Any] = {"decoders": {}}
    aims = []
    for name in DECODERS:
        found = figures["decoders"][name] = cost_of_planning(name)
        print(
            f"{name}: {found['seconds']:.1f} s ({found['cpu_seconds']:.1f} s of CPU), {found['gib']:.2f} GiB"
        )
        aims.append(Aim(f"rrfp-plan on {name}", found["seconds"], SECONDS, "s"))
        aims.append(Aim(f"rrfp-plan on {name}, resident", found["gib"], GIB, "GiB"))
    for config in (quickstart_config(), gpt3_config()):
        figures[f"{config.name}, counted over compiled"] = ratios = counted_over_compiled(config)
        for name, ratio in ratios.items():
            moved, held, mib = ratio["bytes"], ratio["temporaries"], ratio["temporary_mib"]
            print(f"{config.name}, {name}, counted over compiled: bytes {moved:.2f}, ", end="")
            print(f"temporaries {held:.2f} of {mib:,.1f} MiB", flush=True)
    found = figures["quickstart"] = quickstart()
    predicted = (found["predicted_before"] + found["predicted_after"]) / 2
    print(
        f"quickstart, 4 processes: predicted {found['predicted_before'] * 1e3:.0f} ms before and "
        f"{found['predicted_after'] * 1e3:.0f} ms after; load average {found['load']:.1f}"
    )
    for what in ("median", "fastest", "cpu_by_cores"):
        print(f"  real, {what}: {found[what] * 1e3:.0f} ms; predicted / real = {predicted / found[what]:.2f}")
    return finish(options, figures, aims)


if __name__ == "__main__":
    sys.exit(main())
