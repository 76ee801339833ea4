"""Environments that runs have held for long: a run ends there as anywhere else."""

from __future__ import annotations

from collections.abc import Mapping

from tests.verification.environments.living import ALONE, LAUNCHED, SCRIPT, STEPS, Case, case


def _held(name: str, shell: str = LAUNCHED, env: Mapping[str, str | None] | None = None) -> Case:
    """A run that must end well, with all its steps."""
    return case(name, shell, env=env or {}, through=STEPS)


NAMES = "echo ::1 localhost $(hostname) > hosts;"
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
BARE = 'env -i PATH=/usr/bin:/bin ENVIRONMENTS_MARK=$ENVIRONMENTS_MARK PYTHONPATH="$PYTHONPATH" WATCH=$WATCH'
BARE += " MOMENTS= JAX_PLATFORMS=cpu RRFP_KEY_FILE=$RRFP_KEY_FILE"

CASES = [
    _held("usual: two processes"),
    _held("usual: one process", ALONE),
    case("usual: a script", SCRIPT, says=["trained 8 steps"]),
    case(
        "signals: Ctrl-C",
        then={"step 2": "kill -INT $LAUNCHER; sleep 1"},
        status=130,
        says=["Ctrl-C: stopped after step 2; resumes from", "to resume: "],
        headline="Ctrl-C is passed on",
        through=3,
    ),
    case(
        "signals: SIGTERM",
        then={"step 2": "kill $LAUNCHER; sleep 1"},
        says=["SIGTERM: stopped after step 2; resumes from"],
        through=3,
    ),
    case(
        "signals: SIGHUP",
        then={"step 2": "kill -HUP $LAUNCHER; sleep 1"},
        says=["SIGTERM: stopped after step 2; resumes from"],
        headline="SIGTERM, for SIGHUP, is passed on",
        through=3,
    ),
    case("signals: SIGPIPE", then={"step 2": "kill -PIPE $LAUNCHER $RANK0"}, steps=STEPS),
    case(
        "signals: SIGUSR1", then={"step 2": "kill -USR1 $LAUNCHER; sleep 3"}, says=["rank 1"], through=STEPS
    ),
    case(
        "signals: SIGUSR2 to a rank",
        then={"step 2": "kill -USR2 $RANK1"},
        status=1,
        headline=r"rank 1 \(stage 1\) was killed by SIGUSR2",
    ),
    case(
        "signals: nohup, and SIGHUP",
        f"nohup {LAUNCHED}",
        then={"step 2": "kill -HUP $LAUNCHER; sleep 1"},
        through=STEPS,
    ),
    _held("session: setsid", f"setsid -w {LAUNCHED}"),
    _held("session: in the background", f"{LAUNCHED} & wait $!"),
    _held("variables: bare, as cron has it", f"{BARE} {LAUNCHED}"),
    _held("variables: no HOME", env={"HOME": None}),
    _held("variables: HOME that is not there", env={"HOME": "/no/such/home"}),
    _held("variables: a relative HOME", env={"HOME": "home"}),
    _held("variables: TMPDIR that is not there", env={"TMPDIR": "/no/such/folder"}),
    _held("variables: proxies", env=PROXIES),
    _held("variables: PYTHONHASHSEED", env={"PYTHONHASHSEED": "0"}),
    _held("variables: PYTHONOPTIMIZE=2", env={"PYTHONOPTIMIZE": "2"}),
    _held("variables: PYTHONDONTWRITEBYTECODE", env={"PYTHONDONTWRITEBYTECODE": "1"}),
    _held("variables: PYTHONSAFEPATH", env={"PYTHONSAFEPATH": "1"}),
    _held("variables: warnings are errors", env={"PYTHONWARNINGS": "error::UserWarning"}),
    _held("variables: TERM=dumb, NO_COLOR", env={"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "0"}),
    _held("variables: a time zone that is not there", env={"TZ": "No/Where"}),
    _held("limits: umask 077", f"umask 077; {LAUNCHED}"),
    _held("limits: 128 files", f"ulimit -n 128; {LAUNCHED}"),
    _held("limits: 32 GB of addresses", f"ulimit -v 32000000; {LAUNCHED}"),
    _held("limits: 400 processes", f"ulimit -u 400; {LAUNCHED}"),
    _held("limits: no core files", f"ulimit -c 0; {LAUNCHED}"),
    _held("limits: stacks of 1 MB", f"ulimit -s 1024; {LAUNCHED}"),
    _held("limits: nice", f"nice -n 5 {LAUNCHED}"),
    _held("limits: one core", f"taskset -c 0 {LAUNCHED}"),
    _held("paths: spaces", f'mkdir "a b" && mv *.py "a b" && cd "a b" && {LAUNCHED} && mv runs ..'),
    _held("paths: a symbolic link", f"mkdir there && ln -s there runs && {LAUNCHED}"),
    _held(
        "paths: a config in another folder",
        f"mkdir c && mv run.py c && cd c && ln -s ../runs runs; mkdir ../runs; {LAUNCHED}",
    ),
    case(
        "paths: a folder that cannot be written",
        f"{LAUNCHED} --config.directory=/proc/runs",
        status=2,
        headline="^rrfp launch: /proc/runs/trial: cannot be written: No such file or directory",
    ),
    case(
        "paths: /dev/shm is not there",
        f"unshare -m bash -c 'mount -t tmpfs -o size=0,ro none /dev/shm; {LAUNCHED}'",
        needs=["mount", "unshare"],
        through=STEPS,
    ),
    case(
        "network: IPv6 only names",
        f"unshare -m bash -c '{NAMES} mount --bind hosts /etc/hosts; {LAUNCHED}'",
        needs=["mount", "unshare"],
        through=STEPS,
    ),
]
