"""Disks that are full, or that take no more at some moment of a run."""

from __future__ import annotations

from tests.verification.environments.living import ALONE, LAUNCHED, SCRIPT, STEPS, Case

SMALL = "$SMALL_DISK runs 4000"
FILL = "cat /dev/zero > runs/fill 2>/dev/null; true"
FREE = "rm -f runs/fill"
LONG = f"--config.steps={2 * STEPS}"
"""So many steps that their lines need more of the disk, which gives out 4096 bytes at once."""
FULL = "No space left on device"
METRICS = r"metrics\.jsonl: cannot be written: No space left on device; training goes on"
NEEDS = ["mount"]

CASES = [
    Case(
        name="full disk: before the start",
        shell=f"{SMALL}; {FILL}; {LAUNCHED}",
        status=2,
        headline=f"^rrfp launch: .*{FULL}",
        needs=NEEDS,
    ),
    Case(
        name="full disk: before the start, one process",
        shell=f"{SMALL}; {FILL}; {ALONE}",
        status=2,
        headline=f"^rrfp train: .*{FULL}",
        needs=NEEDS,
    ),
    Case(
        name="full disk: while it compiles",
        shell=f"{SMALL}; {LAUNCHED}",
        then={"build": FILL},
        status=1,
        headline=f"^rrfp launch: .*refused: .*{FULL}",
        needs=NEEDS,
    ),
    Case(
        name="full disk: in a step, free again later",
        shell=f"{SMALL}; {LAUNCHED} {LONG}",
        then={"step 1": FILL, "step 13": FREE},
        says=[METRICS, "the checkpoint of step 4 cannot be written", "metrics.jsonl: can be written again"],
        steps=2 * STEPS,
        checkpoint=2 * STEPS,
        needs=NEEDS,
    ),
    Case(
        name="full disk: in a step, one process",
        shell=f"{SMALL}; {ALONE} {LONG}",
        then={"step 1": FILL, "step 13": FREE},
        says=[METRICS, "metrics.jsonl: can be written again"],
        steps=2 * STEPS,
        checkpoint=2 * STEPS,
        needs=NEEDS,
    ),
    Case(
        name="full disk: from a step to the end",
        shell=f"{SMALL}; {LAUNCHED} {LONG}",
        then={"step 5": FILL},
        status=1,
        says=[METRICS, "the checkpoint of step 16 cannot be written", r"step    15 "],
        headline=r"^rrfp launch: rank 0 \(stage 0\) failed: all 16 steps were trained, but .*" + FULL,
        checkpoint=4,
        needs=NEEDS,
    ),
    Case(
        name="full disk: from a step to the end, one process",
        shell=f"{SMALL}; {ALONE} {LONG}",
        then={"step 5": FILL},
        status=1,
        says=[METRICS, "the checkpoint of step 16 cannot be written", r"step    15 "],
        headline=f"^rrfp train: all 16 steps were trained, but .*{FULL}",
        checkpoint=4,
        needs=NEEDS,
    ),
    Case(
        name="full disk: at the end",
        shell=f"{SMALL}; {LAUNCHED}",
        then={"step 7": FILL},
        status=1,
        headline=f"failed: all 8 steps were trained, but .*{FULL}",
        checkpoint=4,
        needs=NEEDS,
    ),
    Case(
        name="full disk: the user's code raises",
        shell=f"{SMALL}; {LAUNCHED}",
        at_step="if step == 3: raise ValueError('bad luck')",
        then={"step 2": FILL},
        status=1,
        headline=r"raised ValueError: bad luck|Run.on_step\(\) raised ValueError: bad luck",
        needs=NEEDS,
    ),
    Case(
        name="full disk: a rank is killed",
        shell=f"{SMALL}; {LAUNCHED}",
        then={"step 2": f"{FILL}; kill -9 $RANK1"},
        status=1,
        headline=r"^rrfp launch: rank 1 \(stage 1\) was killed by SIGKILL",
        needs=NEEDS,
    ),
    Case(
        name="full disk: Ctrl-C",
        shell=f"{SMALL}; {LAUNCHED}",
        then={"step 5": f"{FILL}; kill -INT $LAUNCHER; sleep 1"},
        status=130,
        says=["resumes from runs/trial.checkpoints/4"],
        checkpoint=4,
        needs=NEEDS,
    ),
    Case(
        name="full disk: a script",
        shell=f"{SMALL}; {SCRIPT}",
        then={"step 2": FILL},
        says=["trained 8 steps"],
        needs=NEEDS,
    ),
    Case(
        name="full disk: files of at most 20 kB",
        shell=f"ulimit -f 20; {LAUNCHED} --config.checkpoint.every_steps=0",
        status=(1, 2),
        headline="File too large",
    ),
    Case(
        name="full disk: /tmp",
        shell=f"$SMALL_DISK tmp 100; cat /dev/zero > tmp/fill 2>/dev/null; TMPDIR=$PWD/tmp {LAUNCHED}",
        steps=STEPS,
        checkpoint=STEPS,
        needs=NEEDS,
    ),
]
