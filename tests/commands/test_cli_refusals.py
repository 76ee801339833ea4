"""What the `rrfp train` command refuses, in one line and before anything is compiled."""

import sys
from pathlib import Path

import pytest

from rrfp_jax.runtime.programs.segments import OnDevices
from tests.support.commands import train as main
from tests.support.quickstart import CONFIG, arguments, with_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the texts are."""
    return with_texts(tmp_path_factory.mktemp("cli"))


@pytest.fixture(autouse=True)
def search_path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch):
    monkeypatch.setattr(OnDevices, "lower", lambda *args: pytest.fail("compiled before refusing"))


def refuses(capsys, argv, *said):
    status = main(argv)
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err.startswith("rrfp train: ") and err.count("\n") == 1
    for text in said:
        assert text in err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"step": 3}, ["--config.step=3", "no such flag", "--config.steps"]),
        ({"mesh.ppp": 2}, ["--config.mesh.ppp=2", "no such flag", "--config.mesh.pp"]),
        ({"zzzzz": 2}, ["--config.zzzzz=2", "no such flag", "known: ", "learning_rate"]),
        ({"steps": "many"}, ["--config.steps=many", "give a whole number"]),
        ({"clip_norm": "big"}, ["--config.clip_norm=big", "give a number or None"]),
        ({"loss_scale": "big"}, ["loss_scale='big'", "a number above 0, or 'dynamic'"]),
        ({"on_nonfinite": "warn"}, ["on_nonfinite='warn'", "'stop' or 'skip'"]),
        ({"mesh.share_devices": "maybe"}, ["--config.mesh.share_devices=maybe", "give True or False"]),
        ({"schedule": "zb"}, ["schedule='zb'", "no such schedule or hint", "1f1b, b-priority, bf"]),
        ({"schedule": "csv:no.csv"}, ["csv:no.csv: cannot be read", "No such file"]),
        ({"schedule": "csv:bad.csv"}, ["csv:bad.csv", "stage 1: B1 is missing"]),
        ({"steps": 0}, ["steps=0", "at least one"]),
        ({"mesh.pp": 0}, ["pp=0", "at least one stage"]),
        ({"mesh.pp": 4}, ["4 stages for 3 layers", "at most 3"]),
        ({"mesh.pp": 9}, ["pp=9", "9 devices", "has 4", "share_devices"]),
        ({"split": "(1,1)"}, ["split=[1, 1]", "2 positive whole numbers", "add up to 3"]),
        ({"split": "auto,2"}, ["split='auto,2'", "give 'auto', or the number of layers"]),
        ({"stall_seconds": "-1"}, ["stall_seconds=-1", "seconds above 0"]),
        ({"max_in_flight": 0}, ["max_in_flight=0", "one microbatch"]),
        ({"microbatches": 0}, ["microbatches=0", "multiple"]),
        ({"batch": 3}, ["batch=3", "microbatches=2", "make batch a multiple of microbatches"]),
        ({"validate_every": -1}, ["validate_every=-1", "0 for the end"]),
        ({"name": "a/b"}, ["name='a/b'", "plain file name"]),
        ({"model.d_model": 9}, ["d_model=9", "make d_model a multiple of 2"]),
        ({"model.dtype": "int32"}, ["dtype=int32", "give float32 or bfloat16"]),
    ],
    ids=str,
)
def test_a_field(folder, capsys, overrides, said, monkeypatch):
    monkeypatch.chdir(folder)
    Path("bad.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", encoding="utf-8")
    before = sorted(folder.glob("runs/*"))
    refuses(capsys, arguments(folder, **overrides), *said)
    assert sorted(folder.glob("runs/*")) == before


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("nosuch.txt", ["no such file", "give a path"]),
        ("empty.txt", ["no byte", "give files with text"]),
        ("short.txt", ["3 bytes", "sequence_length=8", "give more text"]),
    ],
)
def test_data(folder, capsys, file, said):
    refuses(capsys, arguments(folder, path=folder / file), file, *said)


def test_a_config_file(folder, capsys):
    refuses(capsys, [], "no --config", "--config=")
    refuses(capsys, [CONFIG, CONFIG], "--config")
    refuses(capsys, ["--config=nosuch.py"], "--config=nosuch.py", "no such file", "get_config()")
    refuses(capsys, [f"--config={folder}/nothing.py"], "nothing.py", "no function get_config()")


def test_other_arguments(folder, capsys):
    refuses(capsys, [CONFIG, "stray"], "stray")
    refuses(capsys, [CONFIG, "--steps=3"], "--steps=3", "a field gets a value by --config.steps=3")
