"""The commands of docs/launch.md that start a named run by hand, on nodes."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.nodes import ranks

LIMIT_SECONDS = 240.0
PAGE = ranks.ROOT / "docs" / "launch.md"


def commands():
    """Those of the page that make the token, and those of a rank, for a run of two."""
    (block,) = re.findall(r"## Multi-node by hand\n.*?```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = block.replace("host0", "n0").replace("PROCESSES=4", "PROCESSES=2")
    once, *lines = text.splitlines()
    return once, "\n".join(line for line in lines if "rrfp doctor" not in line)


@pytest.mark.slow(reason="8 s: two ranks; test_firewall.py has nodes, train/test_processes.py a named run")
def test_a_named_run_starts_by_the_commands_of_the_page(nodes, tmp_path):
    shutil.copy(ranks.ROOT / "tests" / "nodes" / "small_run.py", tmp_path / "run.py")
    (tmp_path / "activation.py").write_text("from jax.nn import relu as activate\n")
    once, each = commands()
    assert nodes.run("n0", "sh", "-c", once, folder=tmp_path).returncode == 0
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{tmp_path}:{ranks.ROOT}"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    started = []
    for rank in (0, 1):
        own = each.replace("RANK=0", f"RANK={rank}").replace("rank-0.log", f"rank-{rank}")
        started.append(nodes.start(f"n{rank}", "bash", "-ec", own, folder=tmp_path, env=environment))
    statuses = [one.wait(LIMIT_SECONDS) for one in started]
    assert statuses == [0, 0], [ranks.said(tmp_path, rank) for rank in (0, 1)]
    assert "step     3" in ranks.said(tmp_path, 0)
    assert (tmp_path / "runs" / "small" / "metrics.jsonl").exists()
    assert (tmp_path / "runs" / "small.checkpoints" / "4").is_dir()
