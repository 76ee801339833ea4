"""A run over two nodes while strangers on a third do what they can at its ports."""

import json
import subprocess
import sys
import time

import pytest

from tests.nodes import ranks

LIMIT_SECONDS = 240.0
LISTENING = f"""
import psutil
for one in psutil.net_connections("tcp"):
    if one.status == "LISTEN" and one.laddr.port != {ranks.PORT}:
        print(one.laddr.port)
"""


@pytest.mark.slow(reason="4 s: a run on two nodes; attacks/test_run.py has strangers on this one")
def test_strangers_on_another_node_do_not_disturb_a_run_that_has_met(nodes, tmp_path):
    started = ranks.start(
        nodes, ["n0", "n1"], [sys.executable, "-m", "tests.attacks.victim", tmp_path / "go"], tmp_path
    )
    deadline, port = time.monotonic() + LIMIT_SECONDS, ""
    while not port:  # on which rank 0 hears the others
        assert time.monotonic() < deadline and started[0].poll() is None, ranks.said(tmp_path, 0)
        port = nodes.run("n0", sys.executable, "-c", LISTENING).stdout.strip()
    strangers = nodes.start(
        "n2",
        *(sys.executable, "-m", "tests.nodes.attacker", nodes.addresses["n0"], ranks.PORT, port),
        folder=ranks.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = []
    for line in strangers.stdout:
        said.append(line)
        if line == "done\n":
            break
    assert said[-1] == "done\n", said
    (tmp_path / "go").touch()  # now rank 1 calls rank 0, which has listened to strangers only
    statuses = [rank.wait(LIMIT_SECONDS) for rank in started]
    strangers.communicate(timeout=LIMIT_SECONDS)
    texts = [ranks.said(tmp_path, rank) for rank in (0, 1)]
    assert statuses == [0, 0], texts
    assert "not of this run" in texts[0] and nodes.addresses["n2"] in texts[0]
    for text in texts:
        found = json.loads(text.strip().rpartition("\n")[2])
        assert (
            found["ranks"] == [0, 1] and found["stored"] == []
        )  # a stranger may delete; see docs/security.md
