"""Terminals, pipes and streams that are closed, and text that cannot be printed."""

from __future__ import annotations

from tests.verification.environments.living import ALONE, LAUNCHED, SCRIPT, STEPS, Case

READER = "> >(echo $BASHPID > $WATCH/reader; exec cat > said) 2>&1"
"""A reader whose id is known, as `2>&1 | tee said` has it."""
KILL_READER = "kill $(cat $WATCH/reader); sleep 0.2"
UNPRINTABLE = """\
class Odd(Exception):
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__
"""
NONE = "import sys; sys.stdout = sys.stderr = None"
CLOSED = "import sys; sys.stdout.close(); sys.stderr.close()"


def _closed(name: str, shell: str, **more: object) -> Case:
    return Case(name=f"streams: {name}", shell=shell, steps=STEPS, checkpoint=STEPS, **more)  # type: ignore[arg-type]


def _in_steps(name: str, code: str) -> list[Case]:
    """A run whose code spoils its streams in a step, in each way to start it."""
    code = f"if step == 2: {code}"
    usual = {"at_step": code, "steps": STEPS, "checkpoint": STEPS}
    return [
        Case(name=f"streams: {name} in a step", **usual),  # type: ignore[arg-type]
        Case(name=f"streams: {name} in a step, one process", shell=ALONE, **usual),  # type: ignore[arg-type]
    ]


CASES = [
    _closed("stdout closed", f"{LAUNCHED} >&-"),
    _closed("stderr closed", f"{LAUNCHED} 2>&-"),
    _closed("both closed", f"{LAUNCHED} >&- 2>&-"),
    _closed("all three closed", f"{LAUNCHED} <&- >&- 2>&-"),
    _closed("all three closed, one process", f"{ALONE} <&- >&- 2>&-"),
    _closed("stdin closed", f"{LAUNCHED} <&-"),
    _closed("| head -1", f"{LAUNCHED} | head -1; exit ${{PIPESTATUS[0]}}"),
    _closed("2>&1 | head -1", f"{LAUNCHED} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"),
    _closed("2>&1 | head -1, one process", f"{ALONE} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"),
    _closed("/dev/full", f"{LAUNCHED} > /dev/full 2>&1"),
    _closed("/dev/full, one process", f"{ALONE} > /dev/full 2>&1"),
    Case(
        name="streams: Ctrl-C, and the reader ends",
        shell=f"{LAUNCHED} {READER}",
        then={"step 2": f"{KILL_READER}; kill -INT $LAUNCHER; sleep 1"},
        status=130,
        steps=3,
        checkpoint=3,
    ),
    Case(
        name="streams: Ctrl-C, and the reader ends, one process",
        shell=f"{ALONE} {READER}",
        then={"step 2": f"{KILL_READER}; kill -INT $RANK0; sleep 1"},
        status=130,
        steps=3,
        checkpoint=3,
    ),
    Case(
        name="streams: SIGTERM, and the reader ends",
        shell=f"{LAUNCHED} {READER}",
        then={"step 2": f"{KILL_READER}; kill $LAUNCHER; sleep 1"},
        steps=3,
        checkpoint=3,
    ),
    Case(
        name="streams: SIGUSR1, and the reader ends",
        shell=f"{LAUNCHED} {READER}",
        then={"step 2": f"{KILL_READER}; kill -USR1 $LAUNCHER; sleep 3"},
        steps=STEPS,
        checkpoint=STEPS,
    ),
    Case(
        name="streams: a rank is killed, and the reader ended",
        shell=f"{LAUNCHED} {READER}; s=$?; cat runs/trial/diagnosis.txt; exit $s",
        then={"step 2": f"{KILL_READER}; kill -9 $RANK1"},
        status=1,
        headline=r"^rrfp launch: rank 1 \(stage 1\) was killed by SIGKILL",
    ),
    *_in_steps("None", NONE),
    *_in_steps("closed", CLOSED),
    Case(name="streams: None at import", at_import=NONE, steps=STEPS, checkpoint=STEPS),
    Case(name="streams: None at import, one process", shell=ALONE, at_import=NONE, steps=STEPS),
    Case(name="streams: closed at import", at_import=CLOSED, steps=STEPS, checkpoint=STEPS),
    Case(
        name="streams: a script without streams",
        shell=SCRIPT,
        at_step="import sys; sys.stdout = sys.stderr = None",
    ),
    Case(
        name="streams: stderr None, and the code raises",
        shell=SCRIPT,
        at_step="import sys; sys.stderr = None; rank == 1 and step == 2 and 1 / 0",
        status=1,
        tracebacks=1,
        headline="rank 1 .*raised ZeroDivisionError",
    ),
    Case(
        name="unprintable: an exception in a script",
        shell=SCRIPT,
        at_import=UNPRINTABLE,
        at_step="if rank == 1 and step == 2: raise Odd",
        status=1,
        tracebacks=1,
        headline=r"^rrfp launch: rank 1 \(stage 1\) raised Odd",
    ),
    Case(
        name="unprintable: an exception in on_step",
        at_import=UNPRINTABLE,
        at_step="if step == 2: raise Odd",
        status=1,
        headline=r"^rrfp launch: .*Run.on_step\(\) raised Odd",
    ),
    Case(
        name="unprintable: an exception in on_step, one process",
        shell=ALONE,
        at_import=UNPRINTABLE,
        at_step="if step == 2: raise Odd",
        status=1,
        headline=r"^rrfp train: Run.on_step\(\) raised Odd",
    ),
    Case(
        name="unprintable: an exception while the config is read",
        at_import=f"{UNPRINTABLE}raise Odd",
        status=2,
        headline="^rrfp launch: --config=run.py: .*raised Odd",
    ),
    Case(
        name="unprintable: sys.exit of an odd object",
        at_import=UNPRINTABLE,
        at_step="if step == 2: raise SystemExit(Odd())",
        status=1,
        headline=r"^rrfp launch: .*Run.on_step\(\) called sys.exit",
    ),
    Case(
        name="unprintable: half of a character",
        at_step="if step == 2: raise ValueError('\\udc80 \\x1b[31m')",
        status=1,
        headline=r"raised ValueError: ",
    ),
    Case(
        name="locale: C, and no UTF-8",
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        at_step="if step == 2: raise ValueError('Zürich ☃')",
        status=1,
        headline="raised ValueError: Z.*rich",
    ),
    Case(
        name="locale: C, one process",
        shell=ALONE,
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        at_step="if step == 2: raise ValueError('Zürich ☃')",
        status=1,
        headline="raised ValueError: Z.*rich",
    ),
    Case(
        name="locale: C, a name that is not ASCII",
        shell=f"{LAUNCHED} --config.directory=läufe",
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        status=2,
        headline="^rrfp launch: directory='l.*ufe': has the character .*, which cannot be printed",
    ),
    Case(
        name="locale: a script prints what is no text",
        shell=SCRIPT,
        at_step="os.write(1, b'\\xff\\xfe\\x00 not UTF-8\\n')",
        says=["trained 8 steps"],
    ),
]
