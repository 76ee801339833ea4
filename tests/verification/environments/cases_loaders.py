"""Data loaders with processes of their own, in ranks, in a run of one process, and beside a launcher."""

from __future__ import annotations

from typing import Any

from tests.verification.environments.living import ALONE, LAUNCHED, SCRIPT, STEPS, Case, case
from tests.verification.environments.loading import WAYS

USE = "from tests.verification.environments import loading\n"
IN_THE_LAUNCHER = f"""\
import os
{USE}
if "RRFP_RANK" not in os.environ:
    loading.keep_a_pool()
"""
TOLD: dict[str, dict[str, Any]] = {
    "os.fork, child raises": {"says": ["ValueError: in the child"], "tracebacks": 2},
    "os.fork, child returns": {"says": ["forked a child that has returned"]},
}
"""What some ways print besides."""


def _cases(where: str, shell: str) -> list[Case]:
    return [
        case(
            f"loader, {where}: {how}",
            shell,
            at_import=f"{USE}loading.use({how!r})",
            silent=["interrupted"],
            through=STEPS,
            **TOLD.get(how, {}),
        )
        for how in WAYS
    ]


CASES = [
    *_cases("rank", LAUNCHED),
    *_cases("alone", ALONE),
    case(
        "loader, script that joins: spawn, pool closed",
        SCRIPT,
        at_import=f"import rrfp_jax as rrfp\nrrfp.join()\n{USE}loading.use('spawn, pool closed')",
        says=["trained 8 steps"],
    ),
    case("loader, launcher: pool kept", at_import=IN_THE_LAUNCHER, through=STEPS),
    case(
        "loader, launcher: pool kept, Ctrl-C",
        at_import=IN_THE_LAUNCHER,
        then={"step 2": "kill -INT $LAUNCHER; sleep 1"},
        status=130,
        says=["Ctrl-C: stopped after step 2; resumes from"],
        through=3,
    ),
    case(
        "loader, alone: Ctrl-C to all of the terminal",
        "set -m; $TRAIN & echo $! > $WATCH/group; wait $!",
        at_import=f"{USE}loading.use('fork, pool kept')",
        then={"step 2": "kill -INT -$(cat $WATCH/group); sleep 1"},
        status=130,
        says=["Ctrl-C: stopped after step 2; resumes from"],
        through=3,
    ),
]
