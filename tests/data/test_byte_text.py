import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.data.byte_text import ByteText, bigram_loss
from rrfp_jax.data.contract import Data
from rrfp_jax.errors import UsageError

FIELDS = ("tokens", "labels", "mask")


@pytest.fixture
def folder(tmp_path):
    """Forty small files in two folders, and things that must be passed over."""
    rng = np.random.default_rng(0)
    for i in range(40):
        file = tmp_path / "ab"[i % 2] / f"{i}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes([i]) * int(rng.integers(1, 60)))
    for other in ("a/image.png", "a/.hidden.txt", ".git/config.txt", "b/empty.txt"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(b"" if "empty" in other else b"\xff" * 99)
    return tmp_path


def text(path, **settings):
    return ByteText(path=str(path), **{"sequence_length": 8, "batch": 3, "microbatches": 2} | settings)


def both(path, **settings):
    return [text(path, split=split, **settings) for split in ("train", "validation")]


def drawn(data, steps):
    """The first bytes of all windows of these steps, in order."""
    return [start for step in steps for mb in data.plan(step) for start in mb.source[1:]]


def test_a_plan_is_a_function_of_seed_step_and_split(folder):
    assert isinstance(text(folder), Data)
    asked_late = text(folder)
    asked_late.plan(9)
    assert asked_late.plan(5) == text(folder).plan(5)
    plans = [text(folder, seed=seed).plan(step) for seed in (0, 1, -1) for step in (0, 1)]
    plans.append(text(folder, split="validation").plan(0))
    assert len({repr(plan) for plan in plans}) == len(plans)


def test_the_order_of_an_epoch_is_pinned(tmp_path):
    # Every process and every later version must draw the same, or a restored run would see other data.
    (tmp_path / "a.txt").write_bytes(bytes(100))
    data = text(tmp_path / "a.txt", batch=6, sequence_length=9, validation_share=0.1)
    assert [start // 9 for start in drawn(data, [0])] == [5, 1, 0, 3, 9, 6, 4, 8, 2, 7, 2, 8]


@pytest.mark.parametrize("windows", [1, 2, 3, 5, 16, 17, 100, 1000])
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_training_uses_every_window_once_per_epoch(tmp_path, windows, seed):
    (tmp_path / "a.txt").write_bytes(bytes(10_000))
    data = text(tmp_path / "a.txt", validation_share=1 - (8 * windows + 1) / 10_000, seed=seed)
    starts = drawn(data, range(windows))  # six epochs: six windows a step
    epochs = [starts[i : i + windows] for i in range(0, len(starts), windows)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(0, 8 * windows, 8))] * 6
    if windows >= 16:
        assert len({tuple(epoch) for epoch in epochs}) == 6


def test_an_epoch_is_well_shuffled(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(200_000))
    data = text(tmp_path / "a.txt", batch=100, microbatches=100, sequence_length=10)
    order = np.array(drawn(data, [0, 1])[: data._windows])
    assert abs(np.corrcoef(order, np.arange(order.size))[0, 1]) < 0.03
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
    again = np.array(drawn(data, range(4))[data._windows :][: data._windows])
    assert abs(np.corrcoef(order, again)[0, 1]) < 0.03


@pytest.mark.parametrize("split", ["train", "validation"])
def test_labels_are_the_next_bytes_and_all_but_the_first_byte_are_labels_once(folder, split):
    data = text(folder, split=split, validation_share=0.3)
    whole = data.data.tobytes()
    steps = range(1) if split == "train" else range(data.steps)
    seen = Counter()
    for mb in [mb for step in steps for mb in data.plan(step)]:
        arrays = data.load(mb, FIELDS)
        for name in FIELDS:
            spec = mb.fields[name]
            assert (arrays[name].shape, str(arrays[name].dtype)) == (spec.shape, spec.dtype)
        assert mb.weight == arrays["mask"].sum()
        for row, start in enumerate(mb.source[1:]):
            real = int(arrays["mask"][row].sum())
            tokens, labels = (bytes(arrays[name][row].astype(np.uint8)) for name in ("tokens", "labels"))
            assert tokens == whole[start : start + real] + bytes(8 - real)
            assert labels == whole[start + 1 : start + 1 + real] + bytes(8 - real)
            assert list(arrays["mask"][row]) == [1] * real + [0] * (8 - real)
            seen.update(range(start + 1, start + 1 + real))
    if split == "validation":
        assert seen == Counter(range(1, len(whole)))
        assert data.plan(data.steps) == data.plan(0)


def test_only_the_fields_asked_for_are_made_and_bytes_only_when_needed(folder):
    data = text(folder)
    (mask,) = data.load(data.plan(0)[0], ["mask"]).items()
    assert mask[0] == "mask" and "data" not in vars(data)


def test_splits_are_disjoint_by_file_and_together_all_the_text(folder):
    train, validation = (set(data.data.tolist()) for data in both(folder, validation_share=0.2))
    assert train | validation == set(range(40))  # file i is made of bytes i
    assert not train & validation and len(validation) == 8
    (folder / "a" / "0.txt").rename(folder / "a" / "new.txt")  # the others hash as before
    renamed = set(both(folder, validation_share=0.2)[1].data.tolist())
    assert len(renamed ^ validation) <= 2


def test_the_split_does_not_depend_on_where_the_folder_is(folder, monkeypatch):
    data = text(folder)
    monkeypatch.chdir(folder.parent)
    assert text(folder.name).plan(3) == data.plan(3)
    assert text(f"{folder.name}/**/[0-9]*.txt").plan(3) == data.plan(3)
    assert text(folder / "a" / "*.txt").plan(3) != data.plan(3)


def test_a_single_file_is_split_by_position(tmp_path):
    (tmp_path / "one.anything").write_bytes(bytes(range(100)))
    train, validation = both(tmp_path / "one.anything", validation_share=0.2)
    assert train.data.tolist() == list(range(80)) and validation.data.tolist() == list(range(80, 100))


def test_the_fingerprint_tells_other_files(folder):
    data = text(folder)
    before = data.plan(0)
    with (folder / "a" / "0.txt").open("ab") as file:
        file.write(b"!")
    with (folder / "b" / "1.txt").open("ab") as file:
        file.write(b"!")
    changed = text(folder)
    assert repr(changed.plan(0)) != repr(before)
    with pytest.raises(UsageError, match=r"planned from other files.*give every process the same files"):
        changed.load(before[0], FIELDS)


def test_a_file_that_shrinks_is_named(folder):
    data = text(folder)
    plan = data.plan(0)
    for i in (0, 2):
        (folder / "a" / f"{i}.txt").write_bytes(b"")
    with pytest.raises(UsageError, match=r"\d\.txt: shorter than the \d+ bytes.*start again"):
        data.load(plan[0], FIELDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, r"batch=0: .*give batch >= 1"),
        ({"microbatches": -2}, r"microbatches=-2: .*give microbatches >= 1"),
        ({"sequence_length": 0}, r"sequence_length=0: .*give sequence_length >= 1"),
        ({"split": "test"}, r"split='test': no such split; give 'train' or 'validation'"),
        ({"validation_share": 0.0}, r"validation_share=0.0: one split would be empty; give 0 < share < 1"),
        ({"validation_share": 1.0}, r"validation_share=1.0: "),
    ],
)
def test_impossible_settings_are_refused_at_once(settings, message):
    with pytest.raises(UsageError, match=message):
        text("", **settings)


def test_files_that_do_not_do_are_refused(tmp_path):
    empty, short = tmp_path / "empty", tmp_path / "short.txt"
    empty.mkdir()
    (empty / "a.txt").touch()
    short.write_bytes(bytes(20))
    for data, message in [
        (text(tmp_path / "nowhere"), r"nowhere': no such file or folder.*give a path that exists"),
        (text(empty), r"empty': 1 text files there, with no byte in them; give files with text"),
        (text(short, sequence_length=50), r"train split has 19 bytes.*sequence_length=50.*give more text"),
        (text(short, split="validation", validation_share=0.01), r"validation split has 0 bytes .*0\.01"),
    ]:
        with pytest.raises(UsageError, match=message):
            data.plan(0)
    data = text(short)
    with pytest.raises(UsageError, match=r"fields \['weights'\].*read from \['tokens', 'labels', 'mask'\]"):
        data.load(data.plan(0)[0], ["tokens", "weights"])


def test_the_standard_library():
    data = ByteText(sequence_length=128, batch=4, microbatches=16)
    names = [piece.name for piece in data._spans]
    assert 5e6 < data._size < 40e6 and len(names) > 300
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "site-packages"))
    assert names == sorted(names) and all(name.endswith(".py") for name in names)
    held = replace(data, split="validation")
    assert 0.01 * data._size < held._size < 0.2 * data._size
    assert not set(names) & {piece.name for piece in held._spans}


def test_bigram_loss_against_counting_by_hand(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "a.txt").write_bytes(rng.choice([0, 7, 255], size=3000, p=[0.7, 0.2, 0.1]).astype(np.uint8))
    train, validation = both(tmp_path / "a.txt", validation_share=0.3)
    pairs = Counter(zip(train.data[:-1], train.data[1:], strict=True))
    first = Counter(train.data[:-1])
    tested = list(zip(validation.data[:-1], validation.data[1:], strict=True))
    nats = -sum(math.log((pairs[a, b] + 1) / (first[a] + 256)) for a, b in tested) / len(tested)
    assert bigram_loss(train, validation) == pytest.approx(nats, rel=1e-12)
    count = 2 * validation.microbatches * validation.batch * validation.sequence_length  # labels of two steps
    assert 0 < count < len(tested)
    nats = -sum(math.log((pairs[a, b] + 1) / (first[a] + 256)) for a, b in tested[:count]) / count
    assert bigram_loss(train, validation, steps=2) == pytest.approx(nats, rel=1e-12)
