"""The second start of the quickstart compiles nothing, on any rank."""

from tests.test_processes import REPOSITORY, command

RANKS = 4


def start(folder):
    """Three steps of the quickstart and a validation; programs compiled by each rank, and what was said."""
    status, said = command(
        *("rrfp_jax.train.launch", "-n", RANKS, REPOSITORY / "tests" / "counted_train.py", folder),
        f"--config={REPOSITORY}/configs/quickstart.py",
        *("--config.steps=3", f"--config.path={REPOSITORY}/docs", f"--config.directory={folder}/runs"),
        folder=folder,
        limit=300.0,
    )
    assert status == 0, said
    return [int((folder / f"compiled-{rank}").read_text()) for rank in range(RANKS)], said


def test_it_compiles_nothing(tmp_path):
    cold, said = start(tmp_path)
    assert all(cold) and " 0 loaded" in said
    warm, said = start(tmp_path)
    assert warm == [0] * RANKS and ": 0 programs compiled" in said and "not used" not in said
