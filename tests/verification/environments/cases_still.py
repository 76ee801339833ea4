"""Everything stands still for some time, as behind a laptop's closed lid, and then goes on."""

from __future__ import annotations

from tests.verification.environments.living import ALONE, LAUNCHED, STEPS, Case, case

STILL = """\
for one in $(grep -lz "^ENVIRONMENTS_MARK=$ENVIRONMENTS_MARK$" /proc/[0-9]*/environ | cut -d/ -f3); do
  case $(readlink /proc/$one/exe) in *python*) kill -STOP $one && stopped="$stopped $one";; esac
done 2> /dev/null
sleep {seconds}; kill -CONT $stopped; sleep 3
"""


def _case(what: str, seconds: float, shell: str = LAUNCHED, moment: str = "step 2", **env: str) -> Case:
    return case(
        f"still: {what}",
        shell,
        env=env,
        then={moment: STILL.format(seconds=seconds)},
        seconds=seconds + 150,
        through=STEPS,
    )


CASES = [
    _case("ten seconds, longer than the limit", 10.0, RRFP_SILENCE_SECONDS="4"),
    _case("two minutes", 125.0),
    _case("two minutes, no limit", 125.0, RRFP_SILENCE_SECONDS="inf"),
    _case("two minutes, while building", 125.0, moment="build"),
    _case("ten seconds, one process", 10.0, shell=ALONE),
]
