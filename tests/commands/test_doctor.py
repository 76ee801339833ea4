"""The preflight: every check on made-up surroundings, and the meeting of tasks on this machine."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from rrfp_jax.commands.preflight import checks, surroundings
from rrfp_jax.commands.preflight.checks import CHECKS, CheckResult, examine
from rrfp_jax.commands.preflight.nixl_probe import ways_in
from rrfp_jax.commands.preflight.surroundings import Folder, Meeting, Nixl, Surroundings, found_place
from rrfp_jax.runtime.run.place import MEMORY, OLD_MEMORY, Address, Place
from tests.launcher.test_slurm import BATCH, JOB, LAST, STEP
from tests.support.commands import doctor

PLACE = Place(Address("n1", 7000), 4, 0, folder=None)
MET = Meeting(hosts=("n1", "n1", "n2", "n2"))
HERE = Meeting(hosts=("n1",) * 4)
LOCAL = PLACE._replace(coordinator=Address("127.0.0.1", 7000))
OWN = {"jax": "0.10.2", "optax": "0.2"}
ALIKE = dataclasses.replace(MET, versions=(OWN,) * 4, code=("a",) * 4)
HOMELESS = dataclasses.replace(MET, sees_home=False)
LOST = Meeting(error="rank 0 cannot be reached")
VERSIONS = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA = {**VERSIONS, "jax-cuda13-plugin": "0.10.2"}
GPUS = {"gpus": 2, "gpu_files": 2, "versions": CUDA}
SEEN = {**GPUS, "platform": "gpu", "devices": 2}
PROXY = {"http_proxy": "http://proxy:3128"}


def in_step(environment=LAST, **more):
    place, step, _ = found_place(environment)
    return {"environment": {**environment, **more}, "place": place, "step": step}


def other(versions=OWN, code="a"):
    """The last rank has other versions, or another code."""
    return dataclasses.replace(ALIKE, versions=(OWN,) * 3 + (OWN | versions,), code=("a",) * 3 + (code,))


TABLE = {  # check: what it finds, the level, what it says, what its fix says
    checks.check_place: [
        ({}, "ok", "alone on n1", ""),
        ({"place": PLACE}, "ok", "rank 0 of 4 on n1, by RRFP_RANK; all meet at n1:7000", ""),
        (in_step(), "ok", "rank 3 of 4 on n1, by srun; all meet at n1:61446", ""),
        ({"environment": {**JOB, "SLURM_NTASKS": "1"}}, "ok", "alone", ""),
        ({"environment": JOB}, "warn", "in job 6 of 4 tasks but no task of srun", "srun python"),
        ({"environment": BATCH}, "warn", "in job 6 of 4 tasks but no task of srun", "srun python"),
        ({"place_error": "RRFP_RANK is missing"}, "FAIL", "RRFP_RANK is missing", "unset"),
        (
            {**in_step(), "place": Place(Address("n1", 1), 4, 0, Path("runs"))},
            "FAIL",
            "launcher of its own",
            "ntasks=1",
        ),
    ],
    checks.check_launcher: [
        ({"environment": {"WORLD_SIZE": "1"}}, None, "", ""),
        ({"environment": {"WORLD_SIZE": "4"}, "place": PLACE}, None, "", ""),
        ({"environment": {"OMPI_COMM_WORLD_SIZE": "4"}}, "FAIL", "mpirun", "RRFP_RANK=$OMPI_COMM_WORLD_RANK"),
        ({"environment": {"WORLD_SIZE": "4"}}, "FAIL", "torchrun", "RRFP_PROCESSES=$WORLD_SIZE"),
    ],
    checks.check_nodes: [
        ({"meeting": MET}, None, "", ""),
        ({"meeting": LOST}, None, "", ""),
        ({"place": PLACE, "meeting": ALIKE}, "ok", "the same packages and modules", ""),
        ({"place": PLACE._replace(rank=1), "meeting": ALIKE}, None, "", ""),
        ({"meeting": other(versions={"jax": "0.11.0"})}, "FAIL", "jax is 0.10.2 on ranks 0, 1, 2", "install"),
        ({"meeting": other(versions={"optax": "9"})}, "warn", "optax is 0.2 on ranks 0, 1, 2", "install"),
        (
            {"meeting": other(code="b")},
            "warn",
            "2 (n1, n2) and rank 3 (n2)",
            "git status",
        ),
    ],
    checks.check_token: [
        ({"meeting": MET}, None, "", ""),
        ({**in_step(), "meeting": LOST}, None, "", ""),
        ({**in_step(), "meeting": MET}, "ok", "shared", ""),
        ({**in_step(RRFP_TOKEN="x"), "meeting": HOMELESS}, None, "", ""),
        ({**in_step(), "meeting": HOMELESS}, "FAIL", "~/.rrfp", "RRFP_TOKEN_FILE"),
    ],
    checks.check_groups: [
        ({"meeting": MET}, None, "", ""),
        ({"tp": 2, "meeting": LOST}, None, "", ""),
        ({"tp": 2, "meeting": MET}, "ok", "on one node", ""),
        ({"tp": 4, "meeting": MET}, "FAIL", "ranks 0 to 3, a group, are on n1, n2", "multiple of 4"),
        ({"tp": 3, "meeting": MET}, "FAIL", "4 ranks are not whole groups", "multiple of 3"),
        ({"tp": 2, "meeting": Meeting(hosts=("a", "b") * 2)}, "FAIL", "ranks 0 to 1", "--distribution=block"),
    ],
    checks.check_versions: [
        ({"versions": VERSIONS}, "ok", "jaxlib 0.10.2", ""),
        ({"versions": CUDA}, "ok", "jax-cuda13-plugin 0.10.2", ""),
        ({"versions": {**VERSIONS, "jax": "0.9.4"}}, "FAIL", "too old", "jax>=0.10.2"),
        ({"versions": {**CUDA, "jaxlib": "0.12.0"}}, "FAIL", "not jaxlib's version", "cuda13"),
        ({"versions": {**CUDA, "jax-cuda12-plugin": "0.10.2"}}, "FAIL", "two plugins", "uninstall"),
    ],
    checks.check_gpus: [
        ({}, "ok", "none here", ""),
        (SEEN, "ok", "JAX sees 2 of 2", ""),
        ({"environment": {"SLURM_STEP_GPUS": "0,1"}}, "FAIL", "given GPU 0,1, but no driver", "--gpus all"),
        ({"probe_error": "Unknown backend", "platform": ""}, "FAIL", "Unknown backend", "JAX_PLATFORMS"),
        (
            {**GPUS, "environment": {"JAX_PLATFORMS": "cpu"}},
            "warn",
            "JAX_PLATFORMS=cpu",
            "unset JAX_PLATFORMS",
        ),
        ({**GPUS, "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "FAIL", "hides them", "unset CUDA_VISIBLE"),
        ({**GPUS, "environment": {"CUDA_VISIBLE_DEVICES": "-1"}}, "FAIL", "hides them", "unset CUDA_VISIBLE"),
        ({**GPUS, "environment": {**LAST, "CUDA_VISIBLE_DEVICES": ""}}, "FAIL", "hides", "--gpus-per-task=1"),
        ({**GPUS, "gpu_files": 0}, "FAIL", "no /dev/nvidia*", "--gpus-per-task=1"),
        ({**GPUS, "versions": VERSIONS}, "FAIL", "plugin is not installed", "cuda13"),
        ({**GPUS, "probe_error": "libcudnn"}, "FAIL", "libcudnn", "LD_LIBRARY_PATH"),
        ({**GPUS}, "FAIL", "finds no device", "LD_LIBRARY_PATH"),
    ],
    checks.check_memory: [
        ({}, None, "", ""),
        ({**SEEN, **in_step(CUDA_VISIBLE_DEVICES="1", SLURM_GPUS_ON_NODE="2")}, None, "", ""),
        ({**SEEN, **in_step(CUDA_VISIBLE_DEVICES="0")}, "warn", "2 ranks share 1", "--gpus-per-task=1"),
        ({**SEEN, **in_step(CUDA_VISIBLE_DEVICES="0", **{MEMORY: "0.4"})}, "warn", "2 ranks share 1", ""),
        (
            {**SEEN, **in_step(CUDA_VISIBLE_DEVICES="0", **{MEMORY: "0.8"})},
            "FAIL",
            "each takes 0.8",
            f"{MEMORY}=0.45",
        ),
        (
            {"environment": {MEMORY: ".5", OLD_MEMORY: ".5"}},
            "FAIL",
            "which JAX refuses",
            f"unset {OLD_MEMORY}",
        ),
    ],
    checks.check_binding: [
        (in_step(CUDA_VISIBLE_DEVICES="1", SLURM_GPUS_ON_NODE="2"), None, "", ""),
        ({"tp": 2, **in_step(CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="2")}, None, "", ""),
        (
            {"tp": 2, **in_step(CUDA_VISIBLE_DEVICES="1", SLURM_GPUS_ON_NODE="2")},
            "warn",
            "1 of 2 GPUs",
            "--gpus-per-node=2",
        ),
    ],
    checks.check_address: [
        ({}, "ok", "listens on 10.0.0.1", ""),
        ({"address": "127.0.0.1"}, "ok", "listens on", ""),
        ({**in_step(), "address": "127.0.1.1", "meeting": MET}, "ok", "listens on", ""),
        ({**in_step(), "address": "127.0.1.1", "meeting": LOST}, "FAIL", "is a loopback", "RRFP_BIND"),
        ({"address_error": "10.9.9.9: Cannot assign"}, "FAIL", "cannot listen on 10.9.9.9", "RRFP_BIND"),
    ],
    checks.check_port: [
        ({}, None, "", ""),
        ({"place": PLACE._replace(rank=1), "meeting": LOST}, None, "", ""),
        ({"place": PLACE, "meeting": MET}, "ok", "7000 is free", ""),
        (
            {"place": PLACE, "meeting": Meeting(port_taken="in use")},
            "FAIL",
            "7000: in use",
            "COORDINATOR=n1:1",
        ),
        (
            {**in_step(STEP), "meeting": Meeting(port_taken="in use")},
            "FAIL",
            "in use",
            "JAX_COORDINATOR_PORT=",
        ),
    ],
    checks.check_exposure: [
        ({}, None, "", ""),
        ({"place": PLACE, "meeting": LOST}, None, "", ""),
        (
            {"place": PLACE, "meeting": MET},
            "ok",
            "on 10.0.0.1, the coordination service on every address:7000",
            "",
        ),
        ({**in_step(), "meeting": MET}, "ok", "listen on 10.0.0.1", ""),
        (
            {"place": PLACE, "meeting": HERE},
            "warn",
            "reach them, and the coordinator at n1:7000",
            "=127.0.0.1:7000",
        ),
        ({"place": LOCAL, "meeting": HERE}, "warn", "reach this one at 10.0.0.1", "unset RRFP_BIND"),
        ({"place": LOCAL, "meeting": HERE, "address": "127.0.0.1"}, "ok", "no other machine reaches", ""),
    ],
    checks.check_proxy: [
        ({"environment": PROXY}, "ok", "none", ""),
        ({"environment": {**PROXY, "no_proxy": "n1"}, "place": PLACE}, "ok", "none", ""),
        ({"environment": PROXY, "place": PLACE}, "warn", "http_proxy=http://proxy", "no_proxy=$no_proxy,n1"),
    ],
    checks.check_peers: [
        ({}, None, "", ""),
        ({"meeting": MET}, "ok", "all of 4 ranks", ""),
        ({"meeting": LOST}, "FAIL", "rank 0 cannot be reached", "firewall"),
    ],
    checks.check_clock: [
        ({}, None, "", ""),
        ({"meeting": LOST}, None, "", ""),
        ({"meeting": dataclasses.replace(MET, ahead=2.5, ahead_error=2)}, "ok", "within 4.500 s", ""),
        ({"meeting": dataclasses.replace(MET, ahead=-2.5, ahead_error=1)}, "warn", "-2.5 s", "chronyc"),
    ],
    checks.check_files: [
        ({"open_files": (1024, 1024)}, "ok", "1024", ""),
        ({"open_files": (-1, -1)}, "ok", "", ""),
        ({"open_files": (256, 4096)}, "FAIL", "1 ranks may need 264", "ulimit -n 264"),
        ({"open_files": (256, 256), "place": PLACE}, "FAIL", "may need 288", "limits.conf"),
    ],
    checks.check_shm: [
        ({}, "ok", "16384 MiB", ""),
        ({"shm_free": 64 << 20}, "warn", "64 MiB", "--shm-size"),
        ({"shm_free": 64 << 20, "gpus": 2}, "FAIL", "64 MiB", "--shm-size"),
    ],
    checks.check_nixl: [
        ({}, None, "", ""),
        ({"gpus": 2}, "warn", "NIXL is not installed", "--no-deps nixl-cu12"),
        (
            {"nixl": Nixl("nixl-cu12 1.5.1", ("cma/memory",))},
            "ok",
            "1.5.1; between processes of this machine by cma/memory",
            "",
        ),
        ({"nixl": Nixl("nixl-cu12 1.5.1", ("tcp/lo",))}, "warn", "falls back to tcp/lo", "SYS_PTRACE"),
        ({"nixl": Nixl("nixl-cu12 1.5.1", (), "no UCX")}, "warn", "does not work here: no UCX", "socket"),
    ],
    checks.check_folder: [
        ({}, "ok", "runs: writable", ""),
        ({"folder": Folder("r", "Read-only file system")}, "FAIL", "r: Read-only", "--config.directory"),
        ({"folder": Folder("r", "", 1 << 29)}, "warn", "512 MiB free", "--config.directory"),
        (
            {"meeting": dataclasses.replace(MET, sees_folder=False)},
            "FAIL",
            "is not seen on n1",
            "all nodes share",
        ),
    ],
}


@pytest.mark.parametrize(
    ("check", "case"), [(check, case) for check, cases in TABLE.items() for case in cases]
)
def test_a_check(check, case):
    surroundings, level, said, fix = case
    found = check(Surroundings(**surroundings))
    if level is None:
        assert found is None
    else:
        its_level, its_said, its_fix = ("ok", found, "") if isinstance(found, str) else found
        assert its_level == level and said in its_said and fix in its_fix, found
        assert bool(its_fix) == (level != "ok")


def test_every_check_is_shown_to_pass_and_to_fail():
    assert set(TABLE) == set(CHECKS.values())
    for check, cases in TABLE.items():
        levels = {level for _, level, _, _ in cases}
        assert levels & {"ok", None} and levels & {"warn", "FAIL"}, check


def test_the_ways_of_writing_are_read_from_what_ucx_prints():
    """Not those of messages, which it prints in the same way."""
    mark, line = "[1795407373.257470] [vm:32628:0]   ", "+--------+-------------+------------+"
    table = [
        line,
        "| A intra-node cfg#1                                 |",
        "| remote memory write by ucp_put* from host memory   |",
        line,
        "| Range   | Description        | Config        |",
        line,
        "| 0..8176 | short              | sysv/memory   |",
        "| 8177..inf | zero-copy        | cma/memory    |",
        line,
        "| active message by ucp_am_send* from host memory    |",
        line,
        "| 0..inf  | multi-frag copy-in | tcp/lo        |",
        line,
    ]
    assert ways_in("\n".join(mark + each for each in table)) == ["sysv/memory", "cma/memory"]
    assert ways_in("what was written is there\n") == []


def test_a_finding_is_a_line_and_a_line_to_paste():
    assert str(CheckResult("ok", "gpus", "JAX sees 2 of 2")) == "ok    gpus: JAX sees 2 of 2"
    assert str(CheckResult("FAIL", "gpus", "none", "unset X")) == "FAIL  gpus: none\n      fix: unset X"


# The meeting.


# The command.


def test_the_command_prints_findings_writes_them_and_ends_with_0(tmp_path, capsys, monkeypatch):
    file = tmp_path / "found.json"
    monkeypatch.setattr(
        "rrfp_jax.commands.doctor.look", lambda environment, **_: Surroundings(versions=VERSIONS)
    )
    assert doctor([f"--json={file}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok    ") for line in said)
    assert [one["level"] for one in json.loads(file.read_text())] == ["ok"] * len(said)
    monkeypatch.setattr("rrfp_jax.commands.doctor.look", lambda environment, **_: Surroundings(versions={}))
    assert doctor([]) == 1
    assert "FAIL  versions" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argument", ["--tp=0", "--limit=nan", "--limit=-1", "--json=/missing/found.json", "--what"]
)
def test_the_command_refuses(argument, capsys, monkeypatch):
    monkeypatch.setattr("rrfp_jax.commands.doctor.look", lambda environment, **_: Surroundings())
    assert doctor([argument]) == 2
    assert re.match("rrfp doctor: .*", capsys.readouterr().err)


def test_what_is_found_here(tmp_path, monkeypatch):
    """The real thing, but for JAX's devices, which the test's own process has in use."""
    monkeypatch.setattr("rrfp_jax.commands.preflight.surroundings.found_devices", lambda *_: ("cpu", 1, ""))
    found = surroundings.look({}, folder=str(tmp_path / "runs"), tp=1)
    assert found.place is None and found.versions["jax"] and not found.address_error
    assert found.nixl.version and found.nixl.ways and not found.nixl.error
    assert found.folder.free > 0 and not found.folder.error and not list((tmp_path / "runs").iterdir())
    assert len(examine(found)) > 5
