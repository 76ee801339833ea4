"""Folders that go away, locks, clocks, and threads that do not end."""

from __future__ import annotations

from tests.verification.environments.living import ALONE, LAUNCHED, SCRIPT, STEPS, case

GONE = "mkdir gone && cp *.py gone && cd gone"
SLEEPER = "import threading, time; threading.Thread(target=time.sleep, args=[600], name='uploader').start()"
HANDLER = "import atexit, time; atexit.register(time.sleep, 600)"
SET_BACK = """\
import time
real, began = time.time, time.monotonic()
time.time = lambda: real() - 3600 * (time.monotonic() - began > 5)
"""
BRISK = {"RRFP_EXIT_SECONDS": "5"}
SECOND = f"{LAUNCHED} > $WATCH/second 2>&1; echo status $? >> $WATCH/second"

CASES = [
    case(
        "folders: the working directory is deleted",
        f'd=$PWD; {GONE}; {LAUNCHED} --config.directory="$d/runs"',
        then={"step 2": "rm -rf gone"},
        through=STEPS,
    ),
    case(
        "folders: the working directory is deleted, one process",
        f'd=$PWD; {GONE}; {ALONE} --config.directory="$d/runs"',
        then={"step 2": "rm -rf gone"},
        through=STEPS,
    ),
    case(
        "folders: the working directory is deleted, a rank is killed",
        f'd=$PWD; {GONE}; {LAUNCHED} --config.directory="$d/runs"',
        then={"step 2": "rm -rf gone; kill -9 $RANK1"},
        status=1,
        headline=r"^rrfp launch: rank 1 \(stage 1\) was killed by SIGKILL",
    ),
    case(
        "folders: the working directory is deleted, and a restart",
        f'd=$PWD; {GONE}; {LAUNCHED} --config.directory="$d/runs" --max-restarts=2',
        then={"step 5": "rm -rf gone; kill -9 $RANK1"},
        status=(1, 2),
        headline=r"^rrfp launch: rank 1 \(stage 1\) was killed by SIGKILL",
        silent=["Errno"],
    ),
    case(
        "folders: no working directory at the start",
        'd=$PWD; mkdir gone; cd gone; rmdir "$d/gone"; ${LAUNCH/run.py/"$d/run.py"}',
        status=2,
        headline="^rrfp launch: ",
    ),
    case(
        "folders: no working directory at the start, a script",
        'd=$PWD; mkdir gone; cd gone; rmdir "$d/gone"; ${SCRIPT/script.py/"$d/script.py"}',
        status=2,
        headline="^rrfp launch: ",
    ),
    case(
        "folders: the run's folder is removed",
        then={"step 2": "rm -rf runs/trial"},
        says=["runs/trial.*removed|removed.*runs/trial"],
        checkpoint=STEPS,
        status=(0, 1),
    ),
    case(
        "folders: the run's folder is removed, one process",
        ALONE,
        then={"step 2": "rm -rf runs/trial"},
        says=["runs/trial.*removed|removed.*runs/trial"],
        checkpoint=STEPS,
        status=(0, 1),
    ),
    case(
        "folders: all runs are removed",
        then={"step 2": "rm -rf runs"},
        says=["runs/trial.*removed|removed.*runs/trial"],
        status=(0, 1),
        checkpoint=STEPS,
    ),
    case(
        "folders: the run's folder is removed, a rank is killed",
        then={"step 2": "rm -rf runs/trial; kill -9 $RANK1"},
        status=1,
        headline=r"^rrfp launch: rank 1.* was killed by SIGKILL",
    ),
    case(
        "folders: the run's folder is removed, and the code raises",
        at_step="if step == 4: raise ValueError('bad luck')",
        then={"step 2": "rm -rf runs/trial"},
        status=1,
        says=["raised ValueError: bad luck"],
    ),
    case(
        "folders: the run's folder is removed, and a restart",
        f"{LAUNCHED} --max-restarts=1",
        then={"step 5": "rm -rf runs/trial; kill -9 $RANK1"},
        status=(0, 1),
        headline=r"^rrfp launch: rank 1.* was killed by SIGKILL",
    ),
    case(
        "folders: removed while it starts", then={"build": "rm -rf runs/.trial.starting-*"}, status=(0, 1, 2)
    ),
    case(
        "folders: a script's folder is removed",
        SCRIPT,
        then={"step 2": "rm -rf runs"},
        says=["trained 8 steps"],
    ),
    case(
        "names: the lock file is deleted",
        f"{LAUNCHED}; cat $WATCH/second",
        then={"step 2": f"rm runs/.trial.lock; {SECOND}"},
        says=["runs/trial is being trained by another process, whose lock file", "status 2"],
        through=STEPS,
    ),
    case(
        "names: a second start",
        f"{LAUNCHED}; cat $WATCH/second",
        then={"step 2": SECOND},
        says=["runs/trial is being trained by process", "status 2"],
        files=["!runs/.trial.*", "!runs/trial.1"],
        through=STEPS,
    ),
    case(
        "names: a launcher killed while it starts",
        f"{LAUNCHED}; {LAUNCHED}",
        then={"build": "rm -f run.py.hold; kill -9 $LAUNCHER; sleep 1"},
        files=["!runs/.trial.starting-*", "!runs/.trial.lock"],
        through=STEPS,
    ),
    case(
        "threads: one that does not end, a script",
        SCRIPT,
        env=BRISK,
        at_step=f"if rank == 1 and step == 2:\n    {SLEEPER}",
        status=1,
        says=["trained 8 steps"],
        headline=r"rank 1 \(stage 1\).*the thread uploader",
        seconds=90,
    ),
    case(
        "threads: one that does not end",
        env=BRISK,
        at_step=f"if rank == 1 and step == 2:\n    {SLEEPER}",
        status=1,
        headline=r"rank 1 \(stage 1\).*the thread uploader",
        seconds=90,
        through=STEPS,
    ),
    case(
        "threads: one that does not end, one process",
        ALONE,
        env=BRISK,
        at_step=f"if step == 2:\n    {SLEEPER.replace('600', '20')}",
        says=["the thread uploader, .* to end$"],
        seconds=90,
        through=STEPS,
    ),
    case(
        "threads: one that the launcher starts, too",
        env=BRISK,
        at_import=SLEEPER,
        status=1,
        says=["the thread uploader"],
        seconds=90,
        through=STEPS,
    ),
    case(
        "threads: an exit handler that sleeps",
        env=BRISK,
        at_step=f"if rank == 1 and step == 2:\n    {HANDLER}",
        status=1,
        headline=r"rank 1 \(stage 1\).*an exit handler",
        seconds=90,
        through=STEPS,
    ),
    case(
        "threads: an exit handler from before, a script",
        SCRIPT,
        env=BRISK,
        at_import=HANDLER,
        status=1,
        says=["an exit handler"],
        seconds=90,
    ),
    case(
        "threads: one that ends soon",
        SCRIPT,
        env=BRISK,
        at_step="import threading; threading.Timer(0.5, print, ['was heard']).start()",
        says=["was heard", "trained 8 steps"],
    ),
    case("clock: set back while the ranks end", at_import=SET_BACK, through=STEPS),
]
