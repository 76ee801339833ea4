"""Lost ranks and their replacement: the launcher with tiny ranks."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from rrfp_jax.errors import DONE, FAILED, INTERRUPTED, REFUSED, TrainingError
from rrfp_jax.launcher.folders import RunFolder
from rrfp_jax.launcher.restarts import Elastic
from rrfp_jax.launcher.spawn import Launch
from rrfp_jax.launcher.supervisor import Patience
from rrfp_jax.runs.saving import save_latest

PROLOGUE = """\
import os, signal, sys, time
from pathlib import Path
rank, count, replicas = (int(os.environ[f"RRFP_{name}"]) for name in ("RANK", "PROCESSES", "REPLICAS"))
lent, restarts = Path(os.environ["RRFP_HOST_MEMORY"]), int(os.environ["RRFP_RESTARTS"])
with (Path(__file__).parent / "attempts").open("a") as file:
    file.write(f"{restarts} {rank} of {count}, {replicas}, {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
def die(): os.kill(os.getpid(), signal.SIGKILL)
def hand_over():
    while not (lent / "hand-over").exists(): time.sleep(0.01)
    sys.exit(75)
def hold(step):
    (lent / "states" / str(step) / "params").mkdir(parents=True, exist_ok=True)
    (lent / "states" / str(step) / "params" / "0").write_text("parameters")
    (lent / "states" / str(step) / "rrfp.json").touch()
def signal_launcher(number):
    if rank == 0: os.kill(os.getppid(), number)
    time.sleep(60)
"""
"""What ranks need; they import nothing of ours, so as to be quick."""


@pytest.fixture
def launch_ranks(tmp_path, capfd):
    """Run a script in two replicas of two ranks: the status, what was said, and who was started."""

    def launch_ranks(text, seconds, restarts=3, checkpoints=tmp_path / "trial.checkpoints", back_off=0.0):
        script, lent = tmp_path / "train.py", tmp_path / "lent"
        script.write_text(PROLOGUE + text)
        lent.mkdir()
        env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {
            "CUDA_VISIBLE_DEVICES": "a,b,c,d"
        }
        patience = Patience(grace=10.0, terminate=0.3, back_off=(back_off,) * 3)

        def save(memory, status, say):
            return save_latest(memory, checkpoints, status, say)

        launch = Launch(
            [sys.executable, str(script)],
            Elastic({1: 2, 2: 4}, seconds, lent, save),
            RunFolder(tmp_path / "runs", "trial"),
            patience,
            env=env,
            max_restarts=restarts,
        )
        status = launch.run()
        started = (tmp_path / "attempts").read_text()
        return status, capfd.readouterr().err, sorted(started.splitlines())

    return launch_ranks


WHOLE = ["0 of 4, 2, a", "1 of 4, 2, b", "2 of 4, 2, c", "3 of 4, 2, d"]


def test_a_lost_replica_is_done_without_and_replaced(launch_ranks):
    status, said, started = launch_ranks(
        "if restarts == 0: die() if rank == 1 else sys.exit(1)\n"
        "hand_over() if replicas == 1 else sys.exit(0)",
        seconds=1,
    )
    assert status == DONE
    fewer = ["1 0 of 2, 1, a", "1 1 of 2, 1, c"]
    assert started == [f"0 {one}" for one in WHOLE] + sorted([*fewer, *(f"1 {one}" for one in WHOLE)])
    first, second = said.splitlines()
    assert "rank 1 was killed by SIGKILL" in first
    assert "; restart 1 of 3 in 0 s with 1 of 2 replicas, with all again 1 s later; see " in first
    assert second.startswith("rrfp launch: continues with all 2 replicas; see ")


@pytest.mark.slow(reason="a run of its own")
def test_at_once_if_no_time_is_to_pass(launch_ranks):
    status, said, started = launch_ranks(
        "die() if restarts == 0 and rank == 3 else sys.exit(restarts == 0)", 0
    )
    assert (status, len(started)) == (DONE, 8) and " in 0 s with all 2 replicas; see " in said


@pytest.mark.slow(reason="a run of its own")
def test_if_too_few_are_left_all_begin_again(launch_ranks):
    status, _, started = launch_ranks(
        "if restarts == 0: die() if rank else sys.exit(1)\nsys.exit(replicas != 2)", seconds=60
    )
    assert status == DONE and started == [f"{n} {one}" for n in (0, 1) for one in WHOLE]


def test_a_loss_while_ranks_hand_over_is_one_more(launch_ranks):
    status, said, started = launch_ranks(
        "if restarts == 0: die() if rank == 1 else sys.exit(1)\n"
        "if restarts == 1 and rank == 1:\n"
        "    while not (lent / 'hand-over').exists(): time.sleep(0.01)\n"
        "    die()\n"
        "hand_over() if replicas == 1 else sys.exit(0)",
        seconds=0.2,
    )
    assert status == DONE and started[6:] == [f"2 {one}" for one in WHOLE]  # their time has come
    assert "; restart 2 of 3 in 0 s with all 2 replicas" in said


@pytest.fixture
def clock(monkeypatch):
    """The seconds of the launcher's clock, which nothing but the test moves."""
    seconds = [0.0]
    monkeypatch.setattr("rrfp_jax.launcher.restarts.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def elastic(folder, seconds=8):
    return Elastic({1: 2, 2: 4}, seconds, folder, lambda memory, status, say: False)


def test_a_second_loss_does_not_put_the_replacement_off(tmp_path, clock):
    replicas = elastic(tmp_path)
    assert replicas.lost([1], True, 0.0) == " with 1 of 2 replicas, with all again 8 s later"
    clock[0] = 3.0
    assert replicas.lost([1], False, 0.0) == " with 1 of 2 replicas, with all again 5 s later"
    clock[0] = 9.0
    replicas.begin()
    replicas.look(pytest.fail)
    assert (tmp_path / "hand-over").exists()
    assert replicas.lost([0], True, 0.0) == " with all 2 replicas"


def test_who_is_lost_again_at_once_is_brought_back_ever_later(tmp_path, clock):
    replicas = elastic(tmp_path)
    assert "again 8 s" in replicas.lost([1], True, 0.0)
    for seconds in (16, 32):
        replicas.handed_over()
        assert f"again {seconds} s" in replicas.lost([1], False, 0.0)
    assert "again 32 s" in replicas.lost([0], True, 0.0)  # one of those that are left
    replicas.handed_over()
    assert "again 32 s" in replicas.lost([3], False, 0.0)  # another one, at its start
    replicas.handed_over()
    assert "again 8 s" in replicas.lost([1], True, 0.0)


def test_all_begin_if_their_time_comes_during_the_wait(tmp_path, clock):
    replicas = elastic(tmp_path)
    assert replicas.lost([1], True, 5.0) == " with 1 of 2 replicas, with all again 3 s later"
    assert replicas.lost([1], True, 30.0) == " with all 2 replicas"


def test_who_is_lost_at_once_is_not_brought_back_at_once(tmp_path, clock):
    replicas = elastic(tmp_path, seconds=0)
    assert replicas.lost([1], True, 0.0) == " with all 2 replicas"
    assert replicas.lost([1], False, 0.0) == " with 1 of 2 replicas, with all again 1 s later"


@pytest.mark.slow(reason="a run of its own")
def test_a_folder_that_somebody_removed_is_made_again(launch_ranks, tmp_path):
    gone = "import shutil\nif restarts == 0:\n    shutil.rmtree(lent, True)\n"
    status, said, _ = launch_ranks(gone + "    die() if rank == 1 else sys.exit(1)", seconds=60)
    assert status == DONE and (tmp_path / "lent").stat().st_mode & 0o777 == 0o700
    assert "Traceback" not in said


def test_a_folder_that_cannot_be_had_is_no_traceback_of_the_launcher(launch_ranks, tmp_path, clock):
    file = "if rank == 1: lent.rename(lent.with_name('old-lent')); lent.touch(); die()\nsys.exit(1)"
    with pytest.raises(TrainingError, match=r"cannot start the ranks: .*File exists: .*lent"):
        launch_ranks(file, seconds=60)
    said, replicas = [], elastic(tmp_path / "lent")
    replicas.lost([1], True, 0.0)
    clock[0] = 9.0
    for _ in range(2):
        replicas.look(said.append)
    assert said == [
        f"the ranks cannot be asked to hand over: {tmp_path}/lent/hand-over: Not a directory; replicas come "
        f"back after the next loss"
    ]


def test_what_all_ranks_refuse_or_raise_is_no_loss(launch_ranks):
    status, said, started = launch_ranks("print('no such file'); sys.exit(2)", 1)
    assert (status, len(started)) == (REFUSED, 4) and "restart" not in said


def test_what_fewer_replicas_refuse_all_have(launch_ranks, tmp_path):
    status, said, started = launch_ranks(
        "if restarts == 0: die() if rank == 1 else sys.exit(1)\n"
        "if replicas == 1: print('too few'); sys.exit(2)",
        seconds=60,
    )
    assert (status, len(started)) == (DONE, 10)
    assert {one[0] for one in started} == {"0", "1"}  # which is no restart
    assert "; not with fewer replicas, then: continues with all 2 replicas; see " in said
    assert "too few" in (tmp_path / "runs" / "trial" / "attempt-2" / "diagnosis.txt").read_text()


def test_only_who_may_hand_over_ends_well_so(tmp_path, capfd):
    code = "import os, sys, time\nif os.environ['RRFP_RANK'] == '1': sys.exit(75)\ntime.sleep(60)"
    patience = Patience(grace=0.2, terminate=0.3)
    folder = RunFolder(tmp_path / "runs", "trial")
    assert Launch([sys.executable, "-c", code], Elastic({1: 2}), folder, patience).run() == FAILED
    assert "rank 1 exited with status 75" in capfd.readouterr().err


@pytest.mark.slow(reason="a run of its own")
def test_losses_are_counted(launch_ranks):
    status, said, _ = launch_ranks("die() if rank == 0 else sys.exit(1)", 60, restarts=1)
    assert status == FAILED and "not restarted again: --max-restarts=1" in said


LOSES_RANK_1 = "if restarts == 0: hold(12); die() if rank == 1 else sys.exit(1)\n"


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ("sys.exit(1)", FAILED),  # the restarts are used up
        (
            "signal.signal(signal.SIGINT, lambda *_: os._exit(130)); signal_launcher(signal.SIGINT)",
            INTERRUPTED,
        ),
        ("signal_launcher(signal.SIGTERM)", DONE),  # while starting: no rank saves
    ],
)
def test_the_launcher_saves_what_no_rank_can(launch_ranks, tmp_path, then, expected):
    status, said, _ = launch_ranks(LOSES_RANK_1 + then, seconds=60, restarts=1)
    checkpoint = tmp_path / "trial.checkpoints" / "12"
    assert status == expected
    assert f"saves the state after 12 steps, which only the host's memory has, as {checkpoint}\n" in said
    assert [path.name for path in checkpoint.parent.iterdir()] == ["12"]
    assert (checkpoint / "params" / "0").read_text() == "parameters"


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, DONE)])
def test_a_signal_while_ranks_hand_over_is_an_interruption(launch_ranks, tmp_path, number, expected):
    status, said, started = launch_ranks(
        LOSES_RANK_1 + "if rank: hand_over()\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(75))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "while not (lent / 'hand-over').exists(): time.sleep(0.01)\n"
        f"time.sleep(0.3); signal_launcher({int(number)})",
        seconds=0.1,
    )
    assert (status, len(started)) == (expected, 6) and "rrfp launch: interrupted\n" in said
    assert (tmp_path / "trial.checkpoints" / "12").exists()


def test_so_it_is_between_two_attempts(launch_ranks, tmp_path):
    def signal_once_set_aside():
        while not (tmp_path / "runs" / "trial" / "attempt-1").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signal_once_set_aside, daemon=True)
    thread.start()
    status, said, started = launch_ranks(LOSES_RANK_1, seconds=60, back_off=20.0)
    thread.join(20.0)
    assert (status, len(started)) == (DONE, 4) and "rrfp launch: interrupted\n" in said
    assert (tmp_path / "trial.checkpoints" / "12").exists()


@pytest.mark.slow(reason="a run of its own")
def test_only_what_is_later_is_saved(launch_ranks, tmp_path):
    (tmp_path / "trial.checkpoints" / "12").mkdir(parents=True)
    (tmp_path / "trial.checkpoints" / "12" / "rrfp.json").touch()
    then = "signal_launcher(signal.SIGTERM)"
    status, said, _ = launch_ranks(LOSES_RANK_1 + then, seconds=60, restarts=1)
    assert status == DONE and "saves the state" not in said


def test_a_run_without_checkpoints_says_what_it_loses(launch_ranks, tmp_path):
    _, said, _ = launch_ranks(LOSES_RANK_1 + "sys.exit(1)", seconds=60, restarts=1, checkpoints=None)
    assert (
        "only the host's memory has, is lost, as the run saves none: --config.checkpoint.every_steps=N"
        in said
    )


def test_what_cannot_be_saved_stays_in_memory(launch_ranks, tmp_path):
    (tmp_path / "file").write_text("")
    _, said, _ = launch_ranks(
        LOSES_RANK_1 + "sys.exit(1)",
        seconds=60,
        restarts=1,
        checkpoints=tmp_path / "file" / "trial.checkpoints",
    )
    kept = tmp_path / "rrfp-kept-lent"
    assert "trial.checkpoints/.12.saving: Not a directory; it stays in memory, in" in said
    assert f"cp -r {kept}/states/12 {tmp_path}/file/trial.checkpoints/ && rm -r {kept}\n" in said
    assert (kept / "states" / "12" / "params" / "0").exists()
