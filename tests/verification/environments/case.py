"""One case of the table: a run in an odd environment, and how it must end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

LAUNCHED = "$LAUNCH"
"""The named run of `run.py` in two processes."""
ALONE = "$TRAIN"
"""The same in one process."""
SCRIPT = "$SCRIPT"
"""`script.py` in two processes."""

SECONDS = 120.0
STEPS, EVERY = 8, 4
"""Steps of a run, and between two checkpoints of the named run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run in an environment.

    The shell command runs in a new folder. It finds `$LAUNCH`, `$TRAIN` and `$SCRIPT` (commands that take
    further arguments, see above), `$PYTHON`, `$WATCH` (a folder outside of the run's), and `$SMALL_DISK
    FOLDER KILOBYTES`, which mounts a file system of that size. `run.py` and `script.py` are made from
    `templates.py`; they stop at the moments of `then`, until its commands are done.

    Attributes:
        name: unique; begins with the class, such as "full disk: at a checkpoint".
        shell: what is run, by bash.
        env: variables of the environment; None removes one.
        at_import, at_step: Python lines put into both files: before anything else, and after each step,
            where `step` and `rank` are known.
        then: by moment ("import", "build", "step 3"), a bash command run meanwhile. It finds `$LAUNCHER`,
            `$RANK0` and `$RANK1`, the ids of the processes.
        status: the exit status that the shell must have, or several that it may have.
        says: regular expressions; each must match somewhere in what is printed.
        headline: a regular expression that the first sentence of ours must match; "" for any, or none.
        silent: regular expressions that must match nowhere in what is printed.
        steps: lines that `metrics.jsonl` must have, whole and in order; None if that is not looked at.
        checkpoint: the latest that must be complete; None if that is not looked at.
        tracebacks: how many may be printed, as when the user's own code raises.
        files: what must be there at the end, as patterns below the folder, and, after "!", what must not.
        seconds: the limit, after which all is killed and the case has failed.
        needs: commands or rights that the machine must have, such as "mount"; else the case is told as
            not run.
    """

    name: str
    shell: str = LAUNCHED
    env: Mapping[str, str | None] = field(default_factory=dict)
    at_import: str = ""
    at_step: str = ""
    then: Mapping[str, str] = field(default_factory=dict)
    status: int | Collection[int] = 0
    says: Collection[str] = ()
    headline: str = ""
    silent: Collection[str] = ()
    steps: int | None = None
    checkpoint: int | None = None
    tracebacks: int = 0
    files: Collection[str] = ()
    seconds: float = SECONDS
    needs: Collection[str] = ()

    @property
    def statuses(self) -> Collection[int]:
        """Those that the shell may have."""
        return (self.status,) if isinstance(self.status, int) else self.status


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended.

    Attributes:
        status: of the shell; None if it had to be killed.
        seconds: that it took.
        text: all that was printed.
        left: command lines of processes that were left behind.
        faults: what was not as it must be; empty if all was.
        missing: what the machine lacks, so that the case was not run; "" if it was.
    """

    status: int | None = None
    seconds: float = 0.0
    text: str = ""
    left: Collection[str] = ()
    faults: Collection[str] = ()
    missing: str = ""
