"""Terminals, pipes and streams that are closed, and text that cannot be printed."""

from __future__ import annotations

from tests.verification.environments.living import ALONE, LAUNCHED, SCRIPT, STEPS, both, case

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


CASES = [
    case("streams: stdout closed", f"{LAUNCHED} >&-", through=STEPS),
    case("streams: stderr closed", f"{LAUNCHED} 2>&-", through=STEPS),
    case("streams: both closed", f"{LAUNCHED} >&- 2>&-", through=STEPS),
    *both(case("streams: all three closed", f"{LAUNCHED} <&- >&- 2>&-", through=STEPS)),
    case("streams: stdin closed", f"{LAUNCHED} <&-", through=STEPS),
    case("streams: | head -1", f"{LAUNCHED} | head -1; exit ${{PIPESTATUS[0]}}", through=STEPS),
    *both(
        case("streams: 2>&1 | head -1", f"{LAUNCHED} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}", through=STEPS)
    ),
    *both(case("streams: /dev/full", f"{LAUNCHED} > /dev/full 2>&1", through=STEPS)),
    case(
        "streams: Ctrl-C, and the reader ends",
        f"{LAUNCHED} {READER}",
        then={"step 2": f"{KILL_READER}; kill -INT $LAUNCHER; sleep 1"},
        status=130,
        through=3,
    ),
    case(
        "streams: Ctrl-C, and the reader ends, one process",
        f"{ALONE} {READER}",
        then={"step 2": f"{KILL_READER}; kill -INT $RANK0; sleep 1"},
        status=130,
        through=3,
    ),
    case(
        "streams: SIGTERM, and the reader ends",
        f"{LAUNCHED} {READER}",
        then={"step 2": f"{KILL_READER}; kill $LAUNCHER; sleep 1"},
        through=3,
    ),
    case(
        "streams: SIGUSR1, and the reader ends",
        f"{LAUNCHED} {READER}",
        then={"step 2": f"{KILL_READER}; kill -USR1 $LAUNCHER; sleep 3"},
        through=STEPS,
    ),
    case(
        "streams: a rank is killed, and the reader ended",
        f"{LAUNCHED} {READER}; s=$?; cat runs/trial/diagnosis.txt; exit $s",
        then={"step 2": f"{KILL_READER}; kill -9 $RANK1"},
        status=1,
        headline=r"^rrfp launch: rank 1 \(stage 1\) was killed by SIGKILL",
    ),
    *both(case("streams: None in a step", at_step=f"if step == 2: {NONE}", through=STEPS)),
    *both(case("streams: closed in a step", at_step=f"if step == 2: {CLOSED}", through=STEPS)),
    case("streams: None at import", at_import=NONE, through=STEPS),
    case("streams: None at import, one process", ALONE, at_import=NONE, steps=STEPS),
    case("streams: closed at import", at_import=CLOSED, through=STEPS),
    case("streams: a script without streams", SCRIPT, at_step="import sys; sys.stdout = sys.stderr = None"),
    case(
        "streams: stderr None, and the code raises",
        SCRIPT,
        at_step="import sys; sys.stderr = None; rank == 1 and step == 2 and 1 / 0",
        status=1,
        tracebacks=1,
        headline="rank 1 .*raised ZeroDivisionError",
    ),
    case(
        "unprintable: an exception in a script",
        SCRIPT,
        at_import=UNPRINTABLE,
        at_step="if rank == 1 and step == 2: raise Odd",
        status=1,
        tracebacks=1,
        headline=r"^rrfp launch: rank 1 \(stage 1\) raised Odd",
    ),
    case(
        "unprintable: an exception in on_step",
        at_import=UNPRINTABLE,
        at_step="if step == 2: raise Odd",
        status=1,
        headline=r"^rrfp launch: .*Run.on_step\(\) raised Odd",
    ),
    case(
        "unprintable: an exception in on_step, one process",
        ALONE,
        at_import=UNPRINTABLE,
        at_step="if step == 2: raise Odd",
        status=1,
        headline=r"^rrfp train: Run.on_step\(\) raised Odd",
    ),
    case(
        "unprintable: an exception while the config is read",
        at_import=f"{UNPRINTABLE}raise Odd",
        status=2,
        headline="^rrfp launch: --config=run.py: .*raised Odd",
    ),
    case(
        "unprintable: sys.exit of an odd object",
        at_import=UNPRINTABLE,
        at_step="if step == 2: raise SystemExit(Odd())",
        status=1,
        headline=r"^rrfp launch: .*Run.on_step\(\) called sys.exit",
    ),
    case(
        "unprintable: half of a character",
        at_step="if step == 2: raise ValueError('\\udc80 \\x1b[31m')",
        status=1,
        headline=r"raised ValueError: ",
    ),
    case(
        "locale: C, and no UTF-8",
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        at_step="if step == 2: raise ValueError('Zürich ☃')",
        status=1,
        headline="raised ValueError: Z.*rich",
    ),
    case(
        "locale: C, one process",
        ALONE,
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        at_step="if step == 2: raise ValueError('Zürich ☃')",
        status=1,
        headline="raised ValueError: Z.*rich",
    ),
    case(
        "locale: C, a name that is not ASCII",
        f"{LAUNCHED} --config.directory=läufe",
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        status=2,
        headline="^rrfp launch: directory='l.*ufe': has the character .*, which cannot be printed",
    ),
    case(
        "locale: a script prints what is no text",
        SCRIPT,
        at_step="os.write(1, b'\\xff\\xfe\\x00 not UTF-8\\n')",
        says=["trained 8 steps"],
    ),
]
