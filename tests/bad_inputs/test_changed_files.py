"""Files of data that change once they were planned, paths without a home, and outputs that are inputs."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax import data
from rrfp_jax.data.sources import BadDocument
from rrfp_jax.errors import REFUSED
from rrfp_jax.files import written_whole
from rrfp_jax.json_files import write_json
from rrfp_jax.report.store import write_steps
from rrfp_jax.trace.costs import constant
from tests.bad_inputs.namespace import timeline
from tests.support.commands import plan, report, sim

ROOT, LIMIT_SECONDS = Path(__file__).parents[2], 20
TEXT = "a few words\n\nand more of them\n" * 20


@pytest.fixture(autouse=True)
def limited():
    """Pipes are not waited for."""
    usual = signal.signal(signal.SIGALRM, lambda *signal: pytest.fail("it has no end"))
    signal.alarm(LIMIT_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, usual)


def bytes_of(path):
    return data.ByteText(path=str(path), sequence_length=8, batch=1, microbatches=1, validation_share=0.5)


def text(folder):
    (folder / "a.txt").write_text(TEXT)
    return folder / "a.txt"


def lines(folder):
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(3)))
    return folder / "a.jsonl"


def tokens(folder):
    np.save(folder / "a.npy", np.arange(100_000, dtype=np.uint16) % 256)
    np.save(folder / "a.offsets.npy", np.array([0, 50_000]))
    return folder / "a.npy"


def reads_last(source):
    """Learn what there is, and give what reads the last document."""
    last = len(source.names) - 1
    return lambda: source.read(last)


def loads(made):
    """Plan a step, and give what loads it."""
    (microbatch,) = made.plan(0)
    return lambda: made.load(microbatch, ["tokens"])


SOURCES = {
    "files": (text, lambda path: reads_last(data.TextFiles(str(path)))),
    "sections": (text, lambda path: reads_last(data.TextFiles(str(path), "section"))),
    "json-lines": (lines, lambda path: reads_last(data.JsonLines(str(path)))),
    "byte-text": (text, lambda path: loads(bytes_of(path))),
}


def shrink(path):
    path.write_bytes(path.read_bytes()[:5])


def as_folder(path):
    path.unlink()
    path.mkdir()


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [Path.unlink, shrink, as_folder, as_pipe], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("kind", SOURCES)
def test_a_file_that_has_changed_since_it_was_planned_is_said(tmp_path, kind, spoil):
    make, plan_it = SOURCES[kind]
    path = make(tmp_path)
    read = plan_it(path)
    spoil(path)
    with pytest.raises((BadDocument, rrfp.UsageError)) as refused:
        read()
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("spoil", [Path.unlink, as_folder, as_pipe], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("kind", SOURCES)
def test_a_file_that_changes_while_it_is_planned_is_said(tmp_path, monkeypatch, kind, spoil):
    make, plan_it = SOURCES[kind]
    path = make(tmp_path)
    for module in (rrfp.data.sources, rrfp.data.byte_text):
        found = module.find_files

        def find(*given, found=found):
            listed = found(*given)
            if not path.is_fifo():
                spoil(path)
            return listed

        monkeypatch.setattr(module, "find_files", find)
    with pytest.raises((BadDocument, rrfp.UsageError)) as refused:
        plan_it(path)()
    assert str(refused.value).isprintable()


SHRUNK = """
import sys; from rrfp_jax import data; from pathlib import Path
source = data.TokenFile(sys.argv[1]); assert len(source.read(0)) == 50_000
import os; os.truncate(sys.argv[1], 1000)
try: source.read(1)
except ValueError as error: print(error)
"""


def test_a_mapped_file_that_shrinks_ends_no_process(tmp_path):
    """It would be a bus error."""
    path = tokens(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SHRUNK, path], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, f"{path} is shorter than it was at the start\n"), done.stderr


HOMELESS = "~nobody-of-this-name/x"
PATHS = {
    "text": lambda: data.TextFiles(HOMELESS).names,
    "lines": lambda: data.JsonLines(HOMELESS).names,
    "bytes": lambda: bytes_of(HOMELESS).plan(0),
    "folder": lambda: data.ImageFolder(HOMELESS).names,
}


@pytest.mark.parametrize("kind", PATHS)
def test_a_home_that_nobody_has(kind):
    said = f"^path='{HOMELESS}': no user here has the home ~nobody-of-this-name; give the path in full$"
    with pytest.raises(rrfp.UsageError, match=said):
        PATHS[kind]()


def test_a_home_that_nobody_has_for_images(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "images": ["b.png"]}\n')
    with pytest.raises(rrfp.UsageError, match=f"folder='{HOMELESS}': no user here has the home ~nobody"):
        data.JsonLines(str(tmp_path / "a.jsonl"), images="images", folder=HOMELESS).read(0)


# Outputs that are inputs.


def same(path, other):
    return path


def hard_link(path, other):
    os.link(path, other)
    return other


def symlink(path, other):
    other.symlink_to(path)
    return other


def other_spelling(path, other):
    return path.parent / "." / ".." / path.parent.name / path.name


LINKS = pytest.mark.parametrize(
    "link", [same, hard_link, symlink, other_spelling], ids=lambda link: link.__name__
)


def corpus(source, tokenizer):
    return data.Corpus(source=source, tokenizer=tokenizer, vocabulary=2**16)


@LINKS
@pytest.mark.parametrize("written", ["tokens", "offsets", "lines"])
def test_tokens_are_not_written_onto_what_they_are_made_of(tmp_path, link, written):
    if written == "lines":
        source = lines(tmp_path).rename(tmp_path / "lines.npy")
        read, made = source, corpus(data.JsonLines(str(source)), data.Bytes())
    else:
        source = tokens(tmp_path)
        read = source if written == "tokens" else source.with_name("a.offsets.npy")
        made = corpus(data.TokenFile(str(source)), None)
    name = "b.offsets.npy" if written == "offsets" else "b.npy"
    output = link(read, tmp_path / name)
    if written == "offsets" and link in (hard_link, symlink):
        output = tmp_path / "b.npy"
    elif written == "offsets":
        output = source
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(rrfp.UsageError, match=r"is the same file as .*, which is read; give another"):
        data.write_tokens(made, output)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tokens_of_which_some_cannot_be_read_leave_what_was_there(tmp_path):
    source = lines(tmp_path)
    made = corpus(data.JsonLines(str(source)), data.Bytes())
    data.write_tokens(made, tmp_path / "made.npy")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()} | {source: b"\n"}
    broken = corpus(data.JsonLines(str(source)), data.Bytes())
    assert broken.lengths.labels.any()
    source.write_text("\n")
    with pytest.raises(rrfp.UsageError, match="was changed during the run"):
        data.write_tokens(broken, tmp_path / "made.npy")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_written_files_keep_links_modes_and_readers(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("before")
    target.chmod(0o600)
    link.symlink_to(target)
    with target.open() as reader:
        write_json(link, [1])
        assert reader.read() == "before"
    assert link.is_symlink() and target.read_text() == "[1]\n" and target.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_file_of_the_longest_name_can_be_written(tmp_path):
    for text in ("first", "second"):
        with written_whole(tmp_path / ("n" * 255)) as part:
            part.write_text(text)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["second"]


def workload(folder):
    path = folder / "w.json"
    path.write_text(json.dumps(constant(2, 2, 1.0).as_json_object()))
    return path, lambda output: sim([f"--workload={path}", f"--out={output}"])


def order(folder):
    path = folder / "order.csv"
    path.write_text("0F0,0F1,0B0,0B1\n")
    return path, lambda output: sim(
        ["--family=constant", "--stages=1", f"--schedule=csv:{path}", f"--trace={output}"]
    )


def config(folder):
    path = Path(shutil.copy(ROOT / "configs" / "quickstart.py", folder))
    return path, lambda output: plan([f"--config={path}", f"--json={output}"])


def trace(folder):
    path = folder / "steps.msgpack"
    write_steps(path, {"run": [timeline().panels[0].step]})
    return path, lambda output: report([str(path), f"--out={output}"])


def trace_of_run(folder):
    path, _ = trace(folder)
    return path, lambda output: report([str(folder), f"--out={output}"])


@LINKS
@pytest.mark.parametrize(
    "made", [workload, order, config, trace, trace_of_run], ids=lambda made: made.__name__
)
def test_a_command_does_not_write_onto_what_it_reads(tmp_path, capsys, link, made):
    path, run = made(tmp_path)
    before, output = path.read_bytes(), link(path, tmp_path / "other")
    assert run(output) == REFUSED
    assert "is the same file as" in capsys.readouterr().err
    assert path.read_bytes() == before
