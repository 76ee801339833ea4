"""Disks that are full, or that take no more at some moment of a run."""

from __future__ import annotations

from functools import partial

from tests.verification.environments.living import ALONE, LAUNCHED, SCRIPT, STEPS, case

SMALL = "$SMALL_DISK runs 4000"
FILL = "cat /dev/zero > runs/fill 2>/dev/null; true"
FREE = "rm -f runs/fill"
LONG = f"--config.steps={2 * STEPS}"
"""So many steps that their lines need more of the disk, which gives out 4096 bytes at once."""
FULL = "No space left on device"
METRICS = r"metrics\.jsonl: cannot be written: No space left on device; training continues"
disk = partial(case, needs=["mount"])

CASES = [
    disk(
        "full disk: before the start",
        f"{SMALL}; {FILL}; {LAUNCHED}",
        status=2,
        headline=f"^rrfp launch: .*{FULL}",
    ),
    disk(
        "full disk: before the start, one process",
        f"{SMALL}; {FILL}; {ALONE}",
        status=2,
        headline=f"^rrfp train: .*{FULL}",
    ),
    disk(
        "full disk: while it compiles",
        f"{SMALL}; {LAUNCHED}",
        then={"build": FILL},
        status=1,
        headline=f"^rrfp launch: .*refused: .*{FULL}",
    ),
    disk(
        "full disk: in a step, free again later",
        f"{SMALL}; {LAUNCHED} {LONG}",
        then={"step 1": FILL, "step 13": FREE},
        says=[METRICS, "the checkpoint of step 4 cannot be written", "metrics.jsonl: can be written again"],
        through=2 * STEPS,
    ),
    disk(
        "full disk: in a step, one process",
        f"{SMALL}; {ALONE} {LONG}",
        then={"step 1": FILL, "step 13": FREE},
        says=[METRICS, "metrics.jsonl: can be written again"],
        through=2 * STEPS,
    ),
    disk(
        "full disk: from a step to the end",
        f"{SMALL}; {LAUNCHED} {LONG}",
        then={"step 5": FILL},
        status=1,
        says=[METRICS, "the checkpoint of step 16 cannot be written", r"step    15 "],
        headline=r"^rrfp launch: rank 0 \(stage 0\) failed: all 16 steps were trained, but .*" + FULL,
        checkpoint=4,
    ),
    disk(
        "full disk: from a step to the end, one process",
        f"{SMALL}; {ALONE} {LONG}",
        then={"step 5": FILL},
        status=1,
        says=[METRICS, "the checkpoint of step 16 cannot be written", r"step    15 "],
        headline=f"^rrfp train: all 16 steps were trained, but .*{FULL}",
        checkpoint=4,
    ),
    disk(
        "full disk: at the end",
        f"{SMALL}; {LAUNCHED}",
        then={"step 7": FILL},
        status=1,
        headline=f"failed: all 8 steps were trained, but .*{FULL}",
        checkpoint=4,
    ),
    disk(
        "full disk: the user's code raises",
        f"{SMALL}; {LAUNCHED}",
        at_step="if step == 3: raise ValueError('bad luck')",
        then={"step 2": FILL},
        status=1,
        headline=r"raised ValueError: bad luck|Run.on_step\(\) raised ValueError: bad luck",
    ),
    disk(
        "full disk: a rank is killed",
        f"{SMALL}; {LAUNCHED}",
        then={"step 2": f"{FILL}; kill -9 $RANK1"},
        status=1,
        headline=r"^rrfp launch: rank 1 \(stage 1\) was killed by SIGKILL",
    ),
    disk(
        "full disk: Ctrl-C",
        f"{SMALL}; {LAUNCHED}",
        then={"step 5": f"{FILL}; kill -INT $LAUNCHER; sleep 1"},
        status=130,
        says=["resumes from runs/trial.checkpoints/4"],
        checkpoint=4,
    ),
    disk("full disk: a script", f"{SMALL}; {SCRIPT}", then={"step 2": FILL}, says=["trained 8 steps"]),
    case(
        "full disk: files of at most 20 kB",
        f"ulimit -f 20; {LAUNCHED} --config.checkpoint.every_steps=0",
        status=(1, 2),
        headline="File too large",
    ),
    disk(
        "full disk: /tmp",
        f"$SMALL_DISK tmp 100; cat /dev/zero > tmp/fill 2>/dev/null; TMPDIR=$PWD/tmp {LAUNCHED}",
        through=STEPS,
    ),
]
