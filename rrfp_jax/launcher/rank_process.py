"""One rank as its launcher sees it: a process in a session of its own, and everything it prints."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen

from rrfp_jax.launcher.end import RankEnd
from rrfp_jax.progress import MARK
from rrfp_jax.runtime.run.exits import WORDS, report_in
from rrfp_jax.runtime.run.recorder import is_stopped

UNSHOWN = re.compile(rb"[%s%s][^\n]*\n" % (MARK.encode(), WORDS.encode()))
"""Lines that are written over, or for the launcher alone, are not kept; one that two chunks share is."""

CHUNK = 65536  # bytes read at once, and the longest line that is waited for
TAIL_LINES = 500  # a crash dumps all threads
LINGER_SECONDS = 1.0  # that the output is read on for after the end
DEATH_SECONDS = 30.0  # after SIGKILL, within which a process ends unless the kernel holds it

# The rank is killed with its launcher. A program that becomes the rank asks the kernel for it, since
# subprocess's `preexec_fn` would run Python between fork and exec.
TIED = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])
"""


class RankProcess:
    """Starts a rank's command; what it prints goes to its log, but for live lines, and by lines to `show`."""

    def __init__(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str], log: Path, show: Callable[[bytes], None]
    ) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)  # its latest lines, live ones left out
        self.end = RankEnd(rank=rank, log_tail=self.tail)
        self.stopped_since = inf  # `time.monotonic()` since when it was seen in process state T
        self._ended_at = 0.0  # `end.ended` by a clock that nobody sets
        self._killed_at = inf  # `time.monotonic()` of the first SIGKILL
        self._rest = b""
        self._show = show
        self._log = log.open("wb", buffering=0)
        argv = [sys.executable, "-I", "-S", "-c", TIED, str(os.getpid()), *argv]
        self._process = Popen(
            argv, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True, bufsize=0
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)

    @property
    def runs(self) -> bool:
        """Whether it has not been seen to end."""
        return self.end.status is None

    @property
    def gone(self) -> bool:
        """Whether it has ended and all its output was read, or waited for long enough."""
        lingers = time.monotonic() - self._ended_at < LINGER_SECONDS
        return not self.runs and (self.output.closed or not lingers)

    def read(self) -> bool:
        """Take what it has printed; False at the end of its output."""
        try:
            data = os.read(self.output.fileno(), CHUNK)
        except BlockingIOError:
            return True
        with suppress(OSError):  # a full disk is no reason to stop watching
            self._log.write(UNSHOWN.sub(b"", data))
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line + b"\n")
        if len(self._rest) > CHUNK or not data:
            self._flush()
        return bool(data)

    def close(self) -> None:
        self._flush()
        self.output.close()
        self._log.close()

    def look(self) -> None:
        """Note whether it stands still or has ended; if so kill what it has left in its group."""
        if not self.runs:
            return
        # Its id is its group's: that is not given away before the dead leader is waited for.
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._kill_group(signal.SIGKILL)
            self._has_ended(self._process.wait())
        elif time.monotonic() - self._killed_at >= DEATH_SECONDS:
            self._line(
                f"process {self._process.pid} has not ended {DEATH_SECONDS:g} s after SIGKILL and is left "
                "behind: the kernel holds it, as for a file system or driver that does not answer\n".encode()
            )
            self._has_ended(-signal.SIGKILL)
        stopped = self.runs and is_stopped(self._process.pid)
        self.stopped_since = min(self.stopped_since, time.monotonic()) if stopped else inf

    def send(self, number: int, to_group: bool = True) -> None:
        """Send a signal to it, and to all of its group but for one that the launcher only passes on."""
        self.look()
        if not self.runs:
            return
        self.end.by_launcher = True
        if number == signal.SIGKILL:
            self._killed_at = min(self._killed_at, time.monotonic())
        if to_group:
            self.end.stopped = self.end.stopped or self.stopped_since < inf
            self._kill_group(number)
        else:
            self._process.send_signal(number)

    def _has_ended(self, status: int) -> None:
        self.end.ended, self._ended_at = time.time(), time.monotonic()
        self.end.status = status

    def _kill_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # the latter of another user's processes
            os.killpg(self._process.pid, number)

    def _flush(self) -> None:
        if self._rest:
            self._line(self._rest)
        self._rest = b""

    def _line(self, line: bytes) -> None:
        if (report := report_in(line)) is not None:
            self.end.report = report
            return
        if not line.startswith(MARK.encode()):
            self.tail.append(line.decode("utf-8", "replace").rstrip())
        self._show(line)
