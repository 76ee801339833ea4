"""The second start of a run compiles nothing, on any rank, whatever shapes its microbatches have."""

import json

import pytest

from tests.train.test_processes import REPOSITORY, command

RANKS = 3  # first, middle and last stage


def start(folder):
    """Three steps on documents in two buckets, and a validation: what each rank compiled, what was said."""
    small = [f"mesh.pp={RANKS}", "buckets=2", "longest=48", "microbatches=4", "model.n_layers=2", "steps=3"]
    status, said = command(
        *("rrfp_jax", "launch", "-n", RANKS, REPOSITORY / "tests/support/counted_train.py", folder),
        f"--config={REPOSITORY}/configs/gpt_lengths.py",
        *(f"--config.{field}" for field in [*small, f"path={REPOSITORY}/docs", f"directory={folder}/runs"]),
        folder=folder,
        limit=300.0,
    )
    assert status == 0, said
    return [int((folder / f"compiled-{rank}").read_text()) for rank in range(RANKS)], said


@pytest.mark.slow(reason="two runs of processes that compile")
def test_it_compiles_nothing(tmp_path):
    cold, said = start(tmp_path)
    assert any(cold), "equal programs are compiled by whoever comes first"
    warm, said = start(tmp_path)
    assert warm == [0] * RANKS and ": 0 programs compiled" in said and "not used" not in said
    (first, *_) = json.loads((tmp_path / "runs" / "gpt_lengths" / "memory.json").read_text())
    assert len(first["buckets"]) == 2
