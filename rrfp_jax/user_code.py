"""Code that users give us to call: what it raises becomes one sentence, and the traceback of their part."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from rrfp_jax.authors import author_of
from rrfp_jax.errors import TrainingError, UsageError, text_of
from rrfp_jax.printing import settle_streams, warn


@dataclass(frozen=True)
class called:
    """Inside, users' code is called.

    No generator of `contextlib`, which lets StopIteration through.

    Attributes:
        what: is called, as a sentence begins: "step 3: the data's plan()".
        error: to raise of whatever it raises, even if that would end the process (`sys.exit`). Our own errors
            and Ctrl-C go through.
    """

    what: str
    error: type[TrainingError] | type[UsageError]
    _process: int = field(default_factory=os.getpid, init=False)

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, raised: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:
            self._end_child(raised)
        if not isinstance(raised, (Exception, SystemExit)) or isinstance(raised, (UsageError, TrainingError)):
            return
        raise self.error(f"{self.what} {_sentence(raised)}{own_traceback(raised)}") from raised

    def _end_child(self, raised: BaseException | None) -> NoReturn:
        """End a child that the user's code has forked, and that came back as if it were this process."""
        code = raised.code if isinstance(raised, SystemExit) else 1
        try:
            if raised is None:
                warn(f"{self.what} forked a child that has returned: end it by os._exit(0)")
            elif not isinstance(raised, SystemExit):
                traceback.print_exception(raised)
            settle_streams()
        finally:
            os._exit(code if isinstance(code, int) else int(code is not None))


def _sentence(raised: BaseException) -> str:
    if isinstance(raised, SystemExit):
        code = raised.code if isinstance(raised.code, (int, str)) else text_of(raised.code)
        return f"called sys.exit({'' if raised.code is None else repr(code)})"
    lines = [line.strip() for line in text_of(raised).splitlines() if line.strip()]
    ended = ": it has come to its end" if isinstance(raised, StopIteration) and not lines else ""
    return f"raised {type(raised).__name__}{f': {lines[0]}' if lines else ended}"


def own_traceback(raised: BaseException) -> str:
    """The frames from the first one on that is not ours, each line after a line break."""
    frames = [f for f in traceback.extract_tb(raised.__traceback__) if not f.filename.startswith("<frozen")]
    first = next((i for i, f in enumerate(frames) if author_of(f.filename) != "ours"), len(frames))
    lines = traceback.StackSummary.from_list(frames[first:]).format()  # long recursions are folded
    if isinstance(raised, SyntaxError):
        lines += traceback.format_exception_only(raised)
    return "".join(f"\n{line.rstrip()}" for line in lines)
