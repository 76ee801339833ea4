"""JAX used before the run is joined, in every way to start a run; and several threads at once."""

from __future__ import annotations

from tests.verification.environments.living import ALONE, SCRIPT, STEPS, case

EARLY = "import jax\nKEY = jax.random.key(0)"
JOINS = "import rrfp_jax as rrfp\nrrfp.join()\n"
BY_HAND = """\
export RRFP_COORDINATOR=127.0.0.1:$((20000 + RANDOM % 10000)) RRFP_PROCESSES=2
export RRFP_TOKEN=0123456789abcdef0123456789abcdef
RRFP_RANK=1 {one} & RRFP_RANK=0 {one}; status=$?; wait $! || status=$?; exit $status
"""
MODULE = "$PYTHON -m rrfp_jax launch -n 2 --name=trial -m script"
FOUR = "sed -i s/pp=2/pp=4/ run.py; $LAUNCH -n 2"

THREADS = """\
import threading
def again():
    try:
        trainer.step(toy.microbatches(3))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
def meanwhile(report):
    other = threading.Thread(target=again, name="other")
    other.start()
    other.join()
trainer._on_step = meanwhile
"""

CASES = [
    case("join: config uses JAX, launched", at_import=EARLY, through=STEPS),
    case("join: config uses JAX, launched, two stages a rank", FOUR, at_import=EARLY, steps=STEPS),
    case("join: config uses JAX, launched, one rank", "$LAUNCH -n 1", at_import=EARLY, steps=STEPS),
    case("join: config uses JAX, by hand", BY_HAND.format(one="$TRAIN"), at_import=EARLY, steps=STEPS),
    case(
        "join: config uses JAX, one process",
        ALONE,
        at_import=EARLY,
        status=2,
        says=[r"rrfp train: Mesh\(pp=2\) .* JAX was used before the mesh .* by .*run\.py:2 \(`KEY = "],
    ),
    case(
        "join: script uses JAX",
        SCRIPT,
        at_import=EARLY,
        status=2,
        says=["by code that ran before `import rrfp_jax` \\(put that first, and this"],
        tracebacks=2,
    ),
    case("join: script joins, then uses JAX", SCRIPT, at_import=JOINS + EARLY, says=["trained 8"]),
    case("join: module joins, then uses JAX", MODULE, at_import=JOINS + EARLY, says=["trained 8"]),
    case(
        "join: script joins by hand, then uses JAX",
        BY_HAND.format(one="$PYTHON script.py"),
        at_import=JOINS + EARLY,
        says=["trained 8"],
    ),
    case(
        "join: script uses JAX after rrfp_jax",
        SCRIPT,
        at_import=f"import rrfp_jax\n{EARLY}",
        status=2,
        says=[r"rrfp launch: all ranks: JAX was used .*: by .*script\.py:3 \(`KEY = .*rrfp\.join\(\)"],
        tracebacks=2,
    ),
    case(
        "threads: a second one steps",
        SCRIPT,
        at_step=THREADS,
        says=[
            "UsageError: Trainer.step in thread 'other' while Trainer.step in thread 'MainThread'",
            "trained 8",
        ],
    ),
]
