"""The check for GPU machines: every part at tiny sizes on this CPU, and what runs and judges the parts."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.gpu import check
from benchmarks.gpu.check import PARTS, Part
from rrfp_jax.runtime.run.place import MEMORY, OLD_MEMORY
from tests.support.kept import with_cache
from tests.support.selected import is_quick

REPOSITORY = Path(__file__).parents[2]

NEEDED = {  # msgspec, and what jax, flax, optax, chex, absl-py and NumPy consist of and import
    *("jax", "jaxlib", "flax", "optax", "chex", "toolz", "absl", "numpy", "ml_dtypes", "opt_einsum", "scipy"),
    *("msgspec", "msgpack", "etils", "treescope", "typing_extensions", "rich", "pygments", "yaml"),
    "cython_runtime",
}
OURS = {"rrfp_jax", "benchmarks", "models", "configs"}

BLOCKER = f"""
import sys
class Filtered:
    def __init__(self, finder):
        self._finder = finder
    def __getattr__(self, name):
        return getattr(self._finder, name)
    def find_spec(self, name, *rest):
        top = name.partition(".")[0]
        known = top in {sorted(NEEDED | OURS)!r} or top in sys.stdlib_module_names or top[0] == "_"
        return self._finder.find_spec(name, *rest) if known else None
sys.meta_path[:] = [Filtered(finder) for finder in sys.meta_path]
"""

ALL_PARTS = """
import importlib, json, sys
from pathlib import Path
from benchmarks.gpu.check import PARTS, Findings
folder = Path(sys.argv[1])
for part in PARTS:  # one process, because importing JAX takes longer than most parts
    found = Findings(folder / f"{part.number}.json", folder, quick=True, seconds=100)
    importlib.import_module(part.module).measure(found)
    found.conclude()
"""


@pytest.fixture(scope="module")
def blocked(tmp_path_factory):
    """An environment in which only the packages that a GPU machine has can be imported, in all processes."""
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    return with_cache({**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"})


@pytest.fixture(scope="module")
def started(blocked, tmp_path_factory):
    """All parts at tiny sizes, under way, and the folder that their findings go to."""
    folder = tmp_path_factory.mktemp("parts")
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, "-c", ALL_PARTS, folder]
        with subprocess.Popen(command, env=blocked, cwd=REPOSITORY, stderr=log) as process:
            yield process, folder
            process.kill()


@pytest.fixture(scope="module")
def everything(started):
    """What all parts found, by number, and the folder."""
    process, folder = started
    assert process.wait(300) == 0, (folder / "log.txt").read_text()
    return {part.number: json.loads((folder / f"{part.number}.json").read_text()) for part in PARTS}, folder


def numbers(tree):
    """All numbers in nested dicts and lists."""
    if isinstance(tree, dict):
        tree = tree.values()
    if isinstance(tree, (list, type({}.values()))):
        return [number for item in tree for number in numbers(item)]
    return [tree] if isinstance(tree, (int, float)) else []


LIMIT_SECONDS = 12  # of which importing JAX takes some

FAKES = {
    "good": "def measure(found):\n    with found.section('a') as f: f['x'] = 1\n    found.headline = 'one'",
    "wrong": """\
        def measure(found):
            with found.section('a') as f: raise ValueError('broken')
            with found.section('b') as f: f['x'] = 1""",
    "dying": "import os\ndef measure(found):\n    print('last words', flush=True)\n    os._exit(3)",
    "hanging": """\
        import os, subprocess, sys, time
        def measure(found):
            child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
            with found.section('a') as f: f['child'] = child.pid
            time.sleep(600)""",
    "naming": """\
        import os, time
        def measure(found):
            (found.folder / "new").write_text(str(os.getpid()))
            (found.folder / "new").rename(found.folder / "pid")
            time.sleep(600)""",
}

ONE_PART = """
import sys
from pathlib import Path
from benchmarks.gpu import check
part = check.Part(number=1, title="naming", module="fake_part", seconds=60, memory=0.5)
check.run([part], Path(sys.argv[1]), quick=True)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    """Fake parts, of which only the first and last pass; one waits for its end while the real ones run.

    `make test` has that one alone.
    """
    if not is_quick(request):
        request.getfixturevalue("started")
    folder, out = tmp_path_factory.mktemp("fakes"), tmp_path_factory.mktemp("out")
    for name, source in FAKES.items():
        (folder / f"fake_{name}.py").write_text(textwrap.dedent(source))
    parts = [
        Part(number=i, title=name, module=f"fake_{name}", seconds=LIMIT_SECONDS, memory=0.5)
        for i, name in enumerate(["good", "wrong", "dying", "hanging", "good"], 1)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("JAX_PLATFORMS", "cpu")
        if is_quick(request):
            return check.run(parts[3:4], out, quick=True), out
        check.run(parts[:2], out, quick=True)
        return check.run(parts[2:], out, quick=True), out


class TestSupervision:
    @pytest.mark.slow(reason="parts of the check run as they would on GPUs")
    def test_one_that_fails_hides_no_other(self, run):
        verdicts = [found["verdict"] for found in json.loads(run[0].file.read_text())["parts"].values()]
        assert verdicts[0] == verdicts[4] == "passed"
        assert verdicts[1] == "failed: a: ValueError: broken"
        assert verdicts[2] == "failed: ended with status 3: last words"
        assert verdicts[3] == f"ran out of time: ended after {LIMIT_SECONDS} s"

    @pytest.mark.slow(reason="5 s: a process")
    def test_what_was_found_before_is_kept(self, run):
        parts = run[0].parts
        assert parts["2"]["figures"] == {"a": {"failed": "ValueError: broken"}, "b": {"x": 1}}
        assert set(parts["4"]["figures"]["a"]) == {"child"} and parts["4"]["machine"]["jax"]

    def test_nothing_is_left_running(self, run):
        deadline = time.monotonic() + 5
        pid = run[0].parts["4"]["figures"]["a"]["child"]
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(pid)

    @pytest.mark.slow(reason="5 s: a process for each part")
    def test_the_log_has_what_was_printed_and_the_table_a_line_each(self, run):
        log = (run[1] / "log.txt").read_text()
        assert "last words" in log and "ValueError: broken" in log
        lines = check.table(run[0]).splitlines()
        assert len(lines) == 5 and lines[0].endswith("passed  one") and "ran out of time" in lines[3]

    def test_memory_is_the_parts_own(self):
        environment = check._environment({OLD_MEMORY: "0.1", "A": "b"}, PARTS[0])
        assert environment[MEMORY] == str(PARTS[0].memory) and OLD_MEMORY not in environment
        assert environment["A"] == "b"

    def test_a_terminated_check_ends_its_part(self, tmp_path):
        (tmp_path / "fake_part.py").write_text(textwrap.dedent(FAKES["naming"]))
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", ONE_PART, str(tmp_path)]
        with subprocess.Popen(command, env=environment, cwd=REPOSITORY) as process:
            until = time.monotonic() + 60
            while not (tmp_path / "pid").exists() and time.monotonic() < until:
                time.sleep(0.05)
            process.terminate()
        assert process.returncode == 128 + signal.SIGTERM
        assert not is_running(int((tmp_path / "pid").read_text()))

    def test_the_parts_take_less_than_ten_minutes(self):
        assert sum(part.seconds for part in PARTS) < 10 * 60
        assert [part.number for part in PARTS] == [1, 2, 3, 4, 6]


@pytest.mark.slow(reason="every part of the check")
class TestParts:
    @pytest.mark.parametrize("part", PARTS, ids=lambda part: part.title)
    def test_every_part_passes_without_other_packages(self, everything, part):
        found = everything[0][part.number]
        assert found["verdict"] == "passed", found
        assert found["quick"] and found["headline"] and found["machine"]["devices"] == ["cpu cpu"]
        figures = numbers(found["figures"])
        assert len(figures) > 2 and all(map(math.isfinite, figures))

    def test_the_blocker_blocks(self, blocked):
        done = subprocess.run(
            [sys.executable, "-c", "import safetensors"], env=blocked, capture_output=True, check=False
        )
        assert b"No module named 'safetensors'" in done.stderr

    def test_what_a_cpu_does_not_have_is_named_and_not_made_up(self, everything):
        found, _ = everything
        assert "one cpu device" in found[1]["figures"]["copies"]["to_another_device"]

    def test_the_questions_all_have_an_answer(self, everything):
        figures = everything[0][1]["figures"]
        assert {"lags", "outputs_are_ready_together"} <= set(figures["readiness"])
        assert set(figures["threads"]) == {"program", "put", "get", "an_input_on_its_way"}
        two = figures["two_processes"]
        assert set(two) == {"socket", "nixl", "overlap", "offered_early"}
        assert all(row["hop_us"] > 0 for row in two["socket"].values())
        assert "NIXL" in two["nixl"]["not_measured"], "one of the packages that are not there"

    def test_the_cost_table_is_as_documented(self, everything):
        table = json.loads((everything[1] / "costs.json").read_text())
        assert table["format"] == "layer costs 1" and table["unit"] == "s" and table["quick"]
        decoder, encoder = table["layers"]
        assert (decoder["sequences"], decoder["tokens"]) == (2, 32)
        assert (encoder["images"], encoder["tokens"]) == (2, 10)
        for row in table["layers"]:
            assert row["forward"] > 0 and row["backward"] > 0 and row["source"] and row["held_bytes"] > 0
        text = (REPOSITORY / "benchmarks" / "results" / "gpu.md").read_text()
        assert all(f"`{name}`" in text for name in {*decoder, *encoder, *table})


class TestCommand:
    @pytest.mark.slow(reason="7 s: the whole command; test_gpu_parts.py has its parts")
    def test_end_to_end(self, blocked, tmp_path):
        command = [sys.executable, "-m", "benchmarks", "gpu", f"--out={tmp_path}", "--quick", "--parts=6"]
        done = subprocess.run(
            [*command, "--check"], env=blocked, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "\n6  layer costs     quick" in done.stdout
        assert sorted(path.name for path in tmp_path.iterdir()) == ["costs.json", "log.txt", "results.json"]

    @pytest.mark.parametrize(
        ("verdict", "status"),
        [("passed", 0), ("skipped: none here", 0), ("failed: x", 1), ("ran out of time: x", 1)],
    )
    def test_exit_status(self, monkeypatch, tmp_path, verdict, status):
        def run(parts, folder, quick):
            results = check.Results(folder)
            for part in parts:
                record = {
                    "title": part.title,
                    "seconds": 1.0,
                    "quick": quick,
                    "headline": "",
                    "verdict": verdict,
                }
                results.add(part, record)
            return results

        monkeypatch.setattr(check, "run", run)
        assert harness.run("gpu", [f"--out={tmp_path}", "--parts=2,3", "--check"]) == status
        assert list(json.loads((tmp_path / "results.json").read_text())["parts"]) == ["2", "3"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--out=x", "--parts=1,8"], "there is no part 8; choose from 1,2,3,4,6"),
            (["--out=file"], "give a folder that can be written"),
            (["--out=foreign"], "results.json is none of this command's"),
        ],
    )
    def test_refused(self, arguments, message, monkeypatch, tmp_path, capsys):
        monkeypatch.chdir(tmp_path)
        Path("file").write_text("")
        Path("foreign").mkdir()
        Path("foreign/results.json").write_text("[1]")
        assert harness.run("gpu", arguments) == 2
        said = capsys.readouterr().err
        assert message in said and len(said.splitlines()) == 1

    @pytest.mark.parametrize("arguments", [["--parts="], ["--parts=1", "--slow"]])
    def test_flags_that_are_not_there_are_refused(self, arguments, capsys):
        with pytest.raises(SystemExit, match="2"):
            harness.run("gpu", arguments)
        assert arguments[-1].partition("=")[0] in capsys.readouterr().err

    @pytest.mark.slow(reason="17 s: the whole command; test_end_to_end has the small one")
    def test_full_size_without_a_gpu_fails(self, tmp_path):
        check.run_part("benchmarks.gpu.costs", str(tmp_path / "found.json"), str(tmp_path), 10, False)
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["verdict"] == "failed: JAX found no GPU here, only cpu; --quick runs on one"
