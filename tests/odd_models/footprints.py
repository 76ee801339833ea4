"""Bytes of every odd model: what its compiled programs are said to take, against what is there.

    python -m tests.odd_models.footprints [--json=FILE] [--check] [--write] [--seconds=N]

Each model of `corpus.py` trains a step, with remat none and full, by a fused and a split order. Of each stage
there are the bytes for microbatches at the worst moment, found in several ways:

    buffers    the live buffers at every task boundary, message and program of a step that is looked at
               (`Inspection` of tests/verification/memory.py), less those before the first task, and XLA's
               word on temporaries
    meter      `Report.peak_bytes` of that step
    paper      the tasks that it recorded, replayed through the footprints by the rules of the exploration
    training   `Report.peak_bytes` of a step that nobody looks at, with delays of its own
    bound      `order_peaks` of the footprints and the largest transient: what budgets go by
    forecast   the bound by `rrfp_jax.forecast`, which compiles nothing

Models that FILE has already are kept, so that the corpus can be done in parts, of `--seconds` each.
"""

import json
import math
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from statistics import median

from benchmarks.harness import RESULTS, Aim, finish, parse, put_figures, say, table
from tests.odd_models import corpus

REMATS, SCHEDULES, MICROBATCHES = ("none", "full"), ("1f1b", "zb-h1"), 6


def rows_of(stages, name, remats=REMATS):
    """All of a model: one for each stage of each run."""
    return [row for remat in remats for row in _rows(stages, name, remat)]


def _rows(stages, name, remat):
    import optax

    import rrfp_jax as rrfp
    from rrfp_jax.core.footprint import order_peaks
    from tests.odd_models import composed, outside
    from tests.verification.memory import Inspection

    pipe = outside.STREAMS[name]() if name in outside.STREAMS else composed.model(name).pipeline()
    data, mesh = composed.batch(MICROBATCHES), rrfp.Mesh(pp=stages)
    ready = rrfp.Settings(remat=remat, dispatch="ready")
    trainer = rrfp.Trainer(pipe, optax.sgd(1e-6), data=data, mesh=mesh, settings=ready, schedule=SCHEDULES[0])
    estimate, settings = _estimate(pipe, data, mesh, remat)
    for schedule in SCHEDULES:
        trainer.schedule = schedule
        report, ledgers = trainer.step(data), trainer.start()
        footprints = [[own.largest.chunks] for own in ledgers]
        orders = [report.trace.order(stage) for stage in range(stages)]
        held = order_peaks(orders, footprints, [0] * MICROBATCHES)
        step = Inspection(trainer, ledgers)
        paper = on_paper(step.report.trace, footprints)
        rules = settings.rules(mesh.placement(trainer.schedule), MICROBATCHES, trainer.schedule)
        predicted = replace(estimate, rules=rules).forecast(None).stages
        for stage, ledger in enumerate(ledgers):
            at_rest = [moment for moment in step.at_rest if moment.stage == stage]
            under_way = [moment for moment in step.under_way if moment.stage == stage]
            bucket, fixed_off = ledger.largest, at_rest[0].found - at_rest[0].of_microbatches
            lasting = ledger.fixed_bytes + bucket.prepared_bytes + MICROBATCHES * bucket.data_bytes
            yield {
                **{"model": name, "remat": remat, "schedule": schedule, "stage": stage},
                **{"layers": sum(last - first for first, last in ledger.layers), "moments": len(at_rest)},
                "fixed_off": fixed_off,  # before the first task, live bytes beyond what the ledger says
                "off": sum(moment.found - fixed_off != moment.of_microbatches for moment in at_rest),
                "buffers": max(moment.found for moment in (*at_rest, *under_way)) - fixed_off,
                "meter": step.report.peak_bytes[stage],
                "paper": paper[stage],
                "training": report.peak_bytes[stage],
                "bound": held[stage] + bucket.transient_bytes,
                "lasting": lasting + held[stage],
                "transient": bucket.transient_bytes,
                "forecast_lasting": predicted[stage].lasting_bytes,
                "forecast_transient": predicted[stage].transient_bytes,
            }


def on_paper(trace, footprints):
    """The most on each stage, each message being delivered before the next task is dispatched."""
    from tests.verification.exploration.cases import Memory
    from tests.verification.exploration.witness import Seen

    memory = Memory(trace.placement, footprints, [0] * MICROBATCHES, [])
    nothing = Seen(frozenset(), frozenset(), frozenset(), (), frozenset())
    seen, peaks = [nothing] * trace.stages, [0] * trace.stages
    for record in sorted(trace.records, key=lambda record: record.dispatched):
        stage, task = record.stage, record.task
        seen[stage] = seen[stage]._replace(dispatched=seen[stage].dispatched | {task})
        running = footprints[stage][0][task.chunk].transient_bytes(task.kind)
        peaks[stage] = max(peaks[stage], memory.held(seen, stage) + running)
        if (destination := trace.placement.destination(stage, task)) is not None:
            other, sent = destination
            peaks[other] = max(peaks[other], memory.held(seen, other))
            seen[other] = seen[other]._replace(arrived=seen[other].arrived | {sent})
    return peaks


def _estimate(pipe, data, mesh, remat):
    """What layers are predicted to take by every kind of backward, and the settings."""
    import optax

    from rrfp_jax.data.contract import as_data
    from rrfp_jax.forecast.devices import CPU, LINKS
    from rrfp_jax.forecast.forecast import Devices, RunSpec, forecast
    from rrfp_jax.runtime.engine.settings import Settings
    from rrfp_jax.sim.choice import Auto

    settings = Settings(remat=remat)
    run = RunSpec(
        pipe=pipe,
        optimizer=optax.sgd(1e-6),
        data=as_data(data),
        mesh=mesh,
        schedule=Auto(candidates=("bfw",)),
        split=None,
        settings=settings,
    )
    devices = Devices(accelerator=CPU, link=LINKS[CPU.link], memory=None, setting=None)
    return forecast(run, devices).estimate, settings


def summary(rows):
    """A line for each way to run, and one for all."""
    ways = [(f"{r}, {s}", [o for o in rows if (o["remat"], o["schedule"]) == (r, s)]) for r, s in WAYS]
    return table(HEADS, [_line(*way) for way in (*ways, ("all", rows))])


WAYS = tuple(product(REMATS, SCHEDULES))
HEADS = (
    *(
        "remat, order",
        "models",
        "stages",
        "fixed off",
        "moments off / of",
        "paper = meter",
        "buffers = meter",
        "below",
    ),
    *("bound = meter", "above", "training = meter", "forecast: lasting equal", "transient enough"),
)


def _line(name, rows):
    def equal(a, b):
        count = sum(row[a] == row[b] for row in rows)
        return "all" if count == len(rows) else f"{count:,}"

    def off(a, b):
        """Of those that differ."""
        shares = [100 * (row[a] / row[b] - 1) for row in rows if row[a] != row[b]]
        return f"{median(shares):.1f} %, at most {max(shares, key=abs):.1f} %" if shares else "-"

    moments = f"{sum(row['off'] for row in rows):,} / {sum(row['moments'] for row in rows):,}"
    enough = sum(row["forecast_transient"] >= row["transient"] for row in rows)
    return [
        *(name, len({row["model"] for row in rows}), f"{len(rows):,}"),
        *(f"{sum(row['fixed_off'] != 0 for row in rows):,}", moments),
        *(equal("paper", "meter"), equal("buffers", "meter"), off("buffers", "meter")),
        *(equal("bound", "meter"), off("bound", "meter"), equal("training", "meter")),
        *(equal("forecast_lasting", "lasting"), f"{enough:,}"),
    ]


def aims_of(rows):
    """What must be so of all of them."""
    wrong = {
        "stages with more fixed bytes than the ledger says": sum(row["fixed_off"] > 0 for row in rows),
        "moments at which the count is not the live buffers": sum(row["off"] for row in rows),
        "stages where the replay is not the meter": sum(row["paper"] != row["meter"] for row in rows),
        "stages with other bytes than the meter says": sum(row["buffers"] != row["meter"] for row in rows),
        "stages above the bound": sum(max(row["meter"], row["training"]) > row["bound"] for row in rows),
        "stages whose lasting bytes were foreseen otherwise": sum(
            row["forecast_lasting"] != row["lasting"] for row in rows
        ),
    }
    return [Aim(name, count, 0, "") for name, count in wrong.items()]


def main():
    """Run, print, write."""
    from tests.odd_models import outside

    parser = parse(__doc__)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/footprints.md")
    parser.add_argument("--first", type=int, default=0, help="number of the first model")
    parser.add_argument("--count", type=int, default=320, help="models drawn at random")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many")
    given = parser.parse_args()
    rows, began = [], time.monotonic()
    if given.json and given.json.exists():
        rows = json.loads(given.json.read_text(encoding="utf-8"))["figures"]
    names = [*range(given.first, given.first + given.count), *outside.STREAMS]
    left = [name for name in names if name not in {row["model"] for row in rows}]
    with get_context("spawn").Pool(given.workers, corpus.begin, maxtasksperchild=40) as pool:
        for number, found in enumerate(pool.imap_unordered(partial(rows_of, given.stages), left), 1):
            rows += found
            if number % 10 == 0:
                say(f"{number} of {len(left)} models")
            if time.monotonic() - began > given.seconds:
                break
    text = summary(rows)
    say(f"\n{text}\n")
    if given.write:
        put_figures(RESULTS / "footprints.md", f"{given.stages} stages", f"\n{text}\n\n")
    return finish(given, rows, aims_of(rows))


if __name__ == "__main__":
    sys.exit(main())
