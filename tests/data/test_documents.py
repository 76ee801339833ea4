"""Documents as microbatches: every token once, equal plans everywhere, and training on mixed buckets."""

import dataclasses
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from models import gpt
from rrfp_jax.data.contract import Data, InMemory, load_repeatedly, plan_hash, plan_step
from rrfp_jax.errors import UsageError
from rrfp_jax.runs.config import load_config
from tests.support import toy, unpadded
from tests.support.programs import compilations

ROOT = Path(__file__).parents[2]
RANDOM = np.random.default_rng(0)
TOKENS = [RANDOM.integers(0, toy.VOCABULARY, n) for n in [*range(2, 14), 30, 41, *RANDOM.integers(2, 20, 40)]]
CORPUS = rrfp.data.Corpus(
    source=rrfp.data.Examples(TOKENS, field=""), tokenizer=None, vocabulary=toy.VOCABULARY
)


def documents(**settings):
    given = {"corpus": CORPUS, "lengths": (4, 8, 16), "tokens": 16, "microbatches": 4} | settings
    return rrfp.data.Documents(**given)


def predictions(data, microbatches):
    """Which (document, place) each real position of these microbatches predicts, and how often."""
    seen = Counter()
    for mb in microbatches:
        arrays = data.load(mb, mb.fields)
        assert mb.weight == arrays["mask"].sum()
        for name, spec in mb.fields.items():
            assert (arrays[name].shape, str(arrays[name].dtype)) == (spec.shape, spec.dtype)
        for r, row in enumerate(mb.source[2:]):
            at = 0
            for piece in data.rows_of_split.pieces(row) if row >= 0 else ():
                document, begin, size = (
                    int(getattr(data.pieces, k)[piece]) for k in ("document", "begin", "size")
                )
                tokens = TOKENS[document][begin : begin + size + 1]
                np.testing.assert_array_equal(arrays["tokens"][r, at : at + size], tokens[:-1])
                np.testing.assert_array_equal(arrays["labels"][r, at : at + size], tokens[1:])
                seen.update((document, begin + i + 1) for i in range(size))
                at += size
            assert arrays["mask"][r].tolist() == [1] * at + [0] * (arrays["mask"].shape[1] - at)
            assert all(not array[r, at:].any() for array in arrays.values())
    return seen


@pytest.mark.parametrize("packed", [False, True])
def test_no_token_is_dropped(packed):
    data = documents(packed=packed, validation_share=0.3)
    held = dataclasses.replace(data, split="validation")
    found = predictions(held, [mb for step in range(held.steps) for mb in held.plan(step)])
    assert held.plan(held.steps) == held.plan(0)
    # In training whole epochs end inside steps: take as many microbatches as complete four of them.
    draw, epochs = data._draw, int(np.lcm.reduce(documents(packed=packed)._taken))
    count = draw._before(epochs)
    plan = [mb for step in range(-(-count // 4)) for mb in data.plan(step)][:count]
    times = predictions(data, plan)
    assert set(times.values()) == {epochs}
    found.update(times.keys())
    assert found == Counter((d, place) for d, tokens in enumerate(TOKENS) for place in range(1, len(tokens)))


def test_packed_rows_tell_documents_apart():
    data = documents(packed=True, lengths=(16,), validation_share=0.1)
    rows = data.rows_of_split
    assert len(rows.size) < 0.8 * len(rows.order) and data.padding < documents(lengths=(16,)).padding
    told = set()
    for mb in data.plan(0):
        arrays = data.load(mb, ["segments", "positions"])
        for r, row in enumerate(mb.source[2:]):
            sizes = data.pieces.size[rows.pieces(row)]
            expected = [(s, place) for s, size in enumerate(sizes, 1) for place in range(size)]
            expected += [(0, 0)] * (16 - len(expected))
            assert list(zip(arrays["segments"][r], arrays["positions"][r], strict=True)) == expected
            told.add(len(sizes))
    assert max(told) > 1  # else there is nothing to tell apart


def test_documents_can_be_pickled_after_use():
    data = documents(corpus=dataclasses.replace(CORPUS))
    (mb, *_) = data.plan(0)
    tokens = data.load(mb, ["tokens"])["tokens"]
    again = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(again.load(mb, ["tokens"])["tokens"], tokens)


def test_masks_are_made_without_reading(monkeypatch):
    data = documents()
    mb = data.plan(0)[0]
    monkeypatch.setattr(rrfp.data.Examples, "read", lambda *args: pytest.fail("read"))
    assert data.load(mb, ["mask"])["mask"].sum() == mb.weight


@pytest.mark.slow(reason="3 s: processes")
def test_plans_are_equal_in_every_process():
    data = load_config(str(ROOT / "configs" / "gpt_lengths.py")).train_data()
    assert isinstance(data, Data)
    code = (
        "from rrfp_jax.runs.config import load_config; from rrfp_jax.data.contract import plan_hash\n"
        "data = load_config('configs/gpt_lengths.py').train_data()\n"
        "print(*(plan_hash(data.plan(step)) for step in (7, 0, 12345)))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1", "PYTHONWARNINGS": "ignore"}
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    with pytest.warns(UserWarning, match="too short: .*__init__.py"):
        hashes = [plan_hash(data.plan(step)) for step in (0, 7, 12345)]
    assert other.stdout.split() == [hashes[1], hashes[0], hashes[2]]
    assert len(set(hashes)) == 3
    assert data.padding < 0.08


def test_balance_evens_shapes_and_rows_out():
    plain = documents(rows=2, tokens=None, lengths=(4, 8, 16))
    assert [mb["tokens"].shape for mb in plain.buckets] == [(2, 4), (2, 8), (2, 16)]
    even = documents(rows=2, tokens=None, balance=rrfp.data.Polynomial(), microbatches=30)
    assert [mb["tokens"].shape for mb in even.buckets] == [(8, 4), (4, 8), (2, 16)]
    drawn = documents(tokens=32, microbatches=30)  # the same shapes, as drawn
    assert plan_step(drawn, 0) != plan_step(even, 0)
    for step in range(3):
        plans = [sorted(data.plan(step), key=lambda mb: mb.source[1]) for data in (drawn, even)]
        rows = [Counter(row for mb in plan for row in mb.source[2:]) for plan in plans]
        assert rows[0] == rows[1]
        for bucket in range(3):
            ranges = [np.ptp([mb.weight for mb in plan if mb.source[1] == bucket] or [0]) for plan in plans]
            assert ranges[1] <= ranges[0]
    longest = documents(rows=2, tokens=None, order="longest").plan(1)
    lengths = [mb.fields["tokens"].shape[1] for mb in longest]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tokens": 0}, "tokens=0: a step would hold no token"),
        ({"tokens": None}, "tokens=None, rows=None: give one"),
        ({"rows": 2}, "tokens=16, rows=2: give one"),
        ({"split": "test"}, "split='test'"),
        ({"validation_share": 1.0}, "validation_share=1.0"),
        ({"order": "random"}, "order='random'.*drawn, longest, shortest, zigzag"),
        ({"lengths": ()}, r"lengths=\(\): give different bucket lengths"),
        ({"validation_share": 0.999}, "54 usable documents cannot be split"),
    ],
)
def test_impossible_settings_are_refused(settings, said):
    with pytest.raises(UsageError, match=said):
        documents(**settings).plan(0)


def test_a_plan_of_other_documents_and_unknown_fields_are_refused():
    mb = documents().plan(0)[0]
    other = documents(corpus=dataclasses.replace(CORPUS, source=rrfp.data.Examples(TOKENS[1:], "")))
    for wrong in (other, documents(split="validation"), documents(packed=True)):
        with pytest.raises(UsageError, match="planned from other documents"):
            wrong.load(mb, ["tokens"])
    with pytest.raises(UsageError, match=r"fields \['segments'\]: .* read from \['tokens'"):
        documents().load(mb, ["segments"])


def test_a_microbatch_that_fits_no_bucket_names_the_nearest():
    batches = [{"x": np.zeros((2, n), np.float32)} for n in (4, 8, 8, 7)]
    buckets = [{"x": jax.ShapeDtypeStruct((2, n), "float32")} for n in (4, 8, 16)]
    stream = rrfp.data.Stream(batches, 2, buckets)
    assert len(plan_step(stream, 0)) == 2
    said = r"step 1: microbatch 1 with x float32\[2, 7\] fits none of the data's 3 buckets; .*\[2, 8\]"
    with pytest.raises(UsageError, match=said):
        plan_step(stream, 1)


def test_streams():
    class Drifting:
        begun = 0

        def __iter__(self):
            self.begun += 1
            return iter([{"x": np.full(2, self.begun)}] * 4)

    stream = rrfp.data.Stream([{"x": np.full(2, i)} for i in range(6)], 2)
    plans = [stream.plan(step) for step in range(stream.steps)]
    assert len(plans) == 3 and rrfp.data.Stream(Drifting(), 2).steps == 1
    assert [stream.plan(step) for step in (1, 0, 2)] == [plans[1], plans[0], plans[2]]
    assert stream.load(plans[1][1], ["x"])["x"].tolist() == [3, 3]
    with pytest.raises(UsageError, match=r"step 3: the stream ends before it, with 0 of 2"):
        stream.plan(3)
    assert stream.plan(0) == plans[0] and stream.plan(0) is stream.plan(0), "made once a step"
    drifting = rrfp.data.Stream(Drifting(), 2)
    first = drifting.plan(0)[0]
    drifting.plan(1)
    with pytest.raises(UsageError, match="gives other microbatches than before"):
        drifting.load(first, ["x"])
    with pytest.raises(UsageError, match="not an iterator"):
        rrfp.data.Stream(iter([]), 2)


def test_the_end_of_a_stream_is_found_once():
    class Counted:
        begun = 0

        def __iter__(self):
            self.begun += 1
            return iter([{"x": np.full(2, i)} for i in range(5)])

    elements = Counted()
    stream = rrfp.data.Stream(elements, 2)
    for step, left in ((2, 1), (2, 1), (3, 0)):
        with pytest.raises(UsageError, match=f"step {step}: the stream ends before it, with {left} of 2"):
            stream.plan(step)
        assert elements.begun == 1
    assert stream.load(stream.plan(1)[0], ["x"])["x"].tolist() == [2, 2]


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_stream_that_fails_once_gives_the_same_when_asked_again(goes_on):
    class Failing:
        """An element that cannot be read at first; then the iterator has ended, or goes on behind it."""

        failed = False

        def __iter__(self):
            return map(self.element, range(6)) if goes_on else (self.element(i) for i in range(6))

        def element(self, i):
            if i == 3 and not self.failed:
                self.failed = True
                raise OSError("a disk")
            return {"x": np.full(2, i)}

    stream = rrfp.data.Stream(Failing(), 2)
    stream.plan(0)
    with pytest.raises(OSError, match="a disk"):
        stream.plan(1)
    assert [stream.load(mb, ["x"])["x"].tolist() for mb in stream.plan(1)] == [[2, 2], [3, 3]]


def test_a_stream_whose_elements_share_their_buffers():
    class Reused:
        def __iter__(self):
            buffer = np.zeros(2, np.int32)
            for i in range(4):
                buffer[:] = i
                yield {"x": buffer}

    stream = rrfp.data.Stream(Reused(), 2)
    assert [stream.load(mb, ["x"])["x"].tolist() for mb in stream.plan(1)] == [[2, 2], [3, 3]]


def test_a_load_that_draws_anew_is_caught():
    plan = plan_step(documents(), 0)
    whole = load_repeatedly(documents(), 0, 1, plan[1])
    assert set(whole) == set(plan[1].fields)

    class Noisy(InMemory):
        random = np.random.default_rng(0)

        def load(self, microbatch, fields):
            found = super().load(microbatch, fields)
            return {k: v + self.random.integers(2, size=v.shape).astype(v.dtype) for k, v in found.items()}

    noisy = Noisy([{"tokens": np.zeros((2, 9), np.int32), "labels": np.zeros((2, 9), np.int32)}])
    with pytest.raises(UsageError, match=r"microbatch 0: load\(\) gave different values for field 'labels'"):
        load_repeatedly(noisy, 0, 0, plan_step(noisy, 0)[0])
    noisy = Noisy(toy.microbatches(2))
    with pytest.raises(UsageError, match=r"microbatch 1: load\(\) gave different values"):
        toy.trainer(2, data=noisy)


# Training.

CFG = gpt.GPTConfig(vocab_size=toy.VOCABULARY, d_model=8, n_heads=1, d_ff=8, n_layers=1)
GPT = (gpt.Embed, gpt.Block, gpt.Head)


def gpt_layers():
    return [rrfp.layer(kind, CFG) for kind in GPT]


def run_gpt(params, mb):
    carry = None
    for i, kind in enumerate(GPT):
        graph, state = nnx.split(kind(CFG, rngs=nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, params[str(i)])
        carry = nnx.merge(graph, state)(carry, mb)
    return carry


def test_mixed_buckets_equal_the_unpadded_unpipelined_reference():
    data, expected = unpadded.documents(), None
    pipe = rrfp.Pipeline(unpadded.layers(), toy.loss)
    assert {mb.fields["tokens"].shape for mb in data.plan(0)} == {(4, 4), (2, 8)}
    for stages in (1, 2, 4):
        trainer = rrfp.Trainer(pipe, data=data, mesh=rrfp.Mesh(pp=stages))
        for schedule in ("bf", "bfw"):
            trainer.schedule = schedule
            loss, leaf, expected = unpadded.differences(trainer, unpadded.run, data, expected)
            assert loss <= 1e-6 and leaf <= 1e-5


@pytest.mark.slow(reason="4 s; test_mixed_buckets_equal_the_unpadded_unpipelined_reference has both")
@pytest.mark.parametrize("packed", [False, True])
def test_attention_sees_neither_padding_nor_other_documents(packed):
    data = unpadded.documents(packed=packed)
    trainer = rrfp.Trainer(rrfp.Pipeline(gpt_layers(), toy.loss), data=data, mesh=rrfp.Mesh(pp=1))
    loss, leaf, expected = unpadded.differences(trainer, run_gpt, data)
    assert loss <= 1e-6 and leaf <= 1e-5
    if packed:  # told nothing of its documents, a model sees the ones before
        fields = [{**data.load(mb, ["tokens", "labels", "mask"])} for mb in data.plan(0)]
        blind = rrfp.Trainer(rrfp.Pipeline(gpt_layers(), toy.loss), mesh=rrfp.Mesh(pp=1))
        assert toy.worst_leaf(blind.value_and_grad(fields)[1], expected[1]) > 1e-3


def test_shapes_that_the_first_step_lacks_are_compiled_before_it():
    data = unpadded.documents(microbatches=1)
    shapes = [mb.fields["tokens"].shape for step in range(6) for mb in data.plan(step)]
    assert len(set(shapes)) == 2
    pipe = rrfp.Pipeline(unpadded.layers(), toy.loss)
    trainer = rrfp.Trainer(pipe, optax.sgd(0.1), data=data, mesh=rrfp.Mesh(pp=1))
    list(trainer.steps(1))
    with compilations() as compiled:
        list(trainer.steps(5))
    assert compiled == []
