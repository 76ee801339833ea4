"""What a launcher shows of its ranks' lines, and keeps of them."""

import io
import os
import sys
import time

from rrfp_jax.launcher.rank_process import RankProcess
from rrfp_jax.launcher.supervisor import Screen
from rrfp_jax.progress import LIVE, MARK, Doing
from rrfp_jax.report import progress_line


class Terminal:
    """A stdout that is one, or is not."""

    def __init__(self, is_one=True):
        self.buffer, self.isatty = io.BytesIO(), lambda: is_one

    def fileno(self):
        raise ValueError("nothing that has a size")

    def shown(self):
        found = self.buffer.getvalue().decode().replace("\r\x1b[K", "<")
        self.buffer = io.BytesIO()
        return found


def test_lines_go_above_the_live_one(monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    screen = Screen()
    screen.show(0, b"first\n")
    assert terminal.shown() == "[0] first\n"
    screen.show(0, f"{MARK}compiling 1/2\n".encode())
    assert terminal.shown() == "compiling 1/2"
    screen.show(1, b"second")
    assert terminal.shown() == "<[1] second\ncompiling 1/2"
    screen.show(0, f"{MARK}{'x' * 100}\n".encode())
    assert terminal.shown() == "<" + "x" * 79
    screen.show(0, f"{MARK}\n".encode())
    screen.live()
    assert terminal.shown() == "<"
    assert screen.environment == {LIVE: "1"}
    monkeypatch.setattr(sys, "stdout", Terminal(is_one=False))
    assert Screen().environment == {}


def test_live_lines_are_not_kept(tmp_path):
    code = f"print('one'); print('{MARK}live'); print('two')"
    shown = []
    rank = RankProcess(0, [sys.executable, "-c", code], dict(os.environ), tmp_path / "log", shown.append)
    limit = time.monotonic() + 20
    while rank.read() and time.monotonic() < limit:
        time.sleep(0.01)
    rank.close()
    assert shown == [b"one\n", f"{MARK}live\n".encode(), b"two\n"]
    assert (tmp_path / "log").read_text() == "one\ntwo\n" and list(rank.tail) == ["one", "two"]


def test_a_rank_writes_live_lines_if_it_is_told_to(monkeypatch):
    said = []
    monkeypatch.setenv(LIVE, "1")
    monkeypatch.setattr(progress_line, "LIVE_AFTER", 0.0)
    lasting = progress_line.printed_lines(said.append)
    lasting(Doing("compiling", 0, 2))
    lasting(Doing("compiling", 2, 2))
    assert said[0] == f"{MARK}compiling 0/2" and said[-2] == MARK
    assert said[-1].startswith("compiling 2/2: done after ")
    monkeypatch.delenv(LIVE)
    progress_line.printed_lines(said.append)(Doing("saving", 0, 1))
    assert not any("saving" in line for line in said), "plain lines tell nothing before a second"
