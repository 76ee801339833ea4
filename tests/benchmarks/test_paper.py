"""What the simulation of the paper's rows rests on."""

import math
import random
from dataclasses import asdict

import pytest

from benchmarks.paper.model import (
    FITTED,
    LANGUAGE,
    NOISE,
    ROWS,
    SCHEDULES,
    VISION,
    Machine,
    Sample,
    in_equal_work,
    layers_of,
    per_token,
    reduce_seconds,
    samples_of,
    stages_of,
    workload,
)
from benchmarks.paper.rows import (
    FORMS,
    Scored,
    fitted,
    held_out,
    least_squares,
    paper_ways,
    ratios_error,
    scores_table,
    taken_apart,
    times_error,
)

ROW = {row.name: row for row in ROWS}
MACHINE = Machine(50e12, 3e9, 0.25, 0.01, 0.0003)


def test_eight_rows_are_fitted_and_twelve_held_out():
    assert len(ROW) == 20
    assert len(FITTED) == 8
    assert ROW.keys() > FITTED
    assert not any("70B" in name or name.endswith("/2") for name in FITTED)


@pytest.mark.parametrize("tower", [LANGUAGE["Qwen3-4B"], VISION["ViT-H"]])
def test_a_layer_counts_what_its_matrices_and_attention_take(tower):
    linear, square = per_token(tower)
    assert linear == pytest.approx(2 * tower.layer_parameters, rel=0.01)
    assert square == pytest.approx(4 * tower.heads * tower.head_width, rel=0.03)


def test_models_have_as_many_parameters_as_their_names_say():
    for name, billions in {
        "GPT3-Large": 0.76,
        "Qwen3-32B + InternViT": 38,
        "LLaMA3-70B + ViT-22B": 92,
    }.items():
        assert sum(layer.parameters for layer in layers_of(name)) / 1e9 == pytest.approx(billions, rel=0.05)


def test_a_backward_takes_twice_the_operations_of_a_forward():
    for layer in layers_of("Qwen3-4B + ViT-Big"):
        forward, inputs, weights = layer.flops(Sample(256, 512))
        assert inputs + weights == pytest.approx(2 * forward)


def test_stages_have_all_layers_in_order_and_about_equal_work():
    stages = stages_of("Qwen3-4B + ViT-Big", 1, 8, MACHINE)
    assert [layer for own in stages for layer in own] == layers_of("Qwen3-4B + ViT-Big")
    work = [sum(sum(layer.flops(Sample(256, 512))) for layer in own) for own in stages]
    assert max(work) < 1.2 * min(work)


def test_an_even_split_cuts_layers_and_loses_nothing():
    layers = layers_of("Qwen3-4B + ViT-Big")
    work = [sum(layer.flops(Sample(256, 512))) for layer in layers]
    stages = in_equal_work(layers, work, 7)
    done = [sum(sum(layer.flops(Sample(256, 512))) for layer in own) for own in stages]
    assert done == pytest.approx([sum(work) / 7] * 7)
    assert sum(layer.share for own in stages for layer in own) == pytest.approx(len(layers))


def test_lengths_vary_only_where_there_are_images():
    assert set(samples_of(ROW["GPT3-Large 1/8/1"], 0.5, 0)) == {Sample(0, 2048)}
    samples = samples_of(ROW["Qwen3-4B + ViT-Big 1/8/1"], 0.25, 0)
    logs = [math.log(sample.image) for sample in samples]
    mean = sum(logs) / len(logs)
    assert math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs)) == pytest.approx(0.25, rel=0.2)


def test_a_machine_scales_what_it_should():
    row = ROW["GPT3-Large 1/8/1"]
    slow, fast = (workload(row, Machine(flops, 3e9, 0.0), 0) for flops in (1e12, 2e12))
    assert slow.forward[0][0] == pytest.approx(2 * fast.forward[0][0])
    assert slow.transfer_forward == fast.transfer_forward
    assert slow.transfer_forward[0][0] == pytest.approx(2048 * 1536 * 2 / 3e9)
    assert slow.transfer_forward[-1][0] == slow.transfer_backward[0][0] == 0
    three = stages_of(row.model, 1, 8, MACHINE)[0]
    added = workload(row, Machine(1e12, 3e9, 0.0, layer=1.0), 0).forward[0][0] - slow.forward[0][0]
    assert math.exp(-4 * NOISE) < added / len(three) < math.exp(4 * NOISE)


def test_replicas_add_up_their_gradients():
    assert reduce_seconds(ROW["LLaMA3-8B + ViT-5B 2/16/1"], MACHINE) == 0
    assert 0.1 < reduce_seconds(ROW["LLaMA3-8B + ViT-5B 2/8/2"], MACHINE) < 2


def test_only_messages_of_some_length_have_the_price_of_an_exchange():
    assert paper_ways(ROW["GPT3-Large 1/8/1"], MACHINE)["1F1B"].exchange == 0
    how = paper_ways(ROW["Qwen3-32B + InternViT 1/64/1"], MACHINE)
    assert [how[name].exchange for name in SCHEDULES] == [0.01, 0.01, 0, 0]
    assert how["BF"].limit == 64


def test_a_fit_finds_the_numbers_that_made_the_figures():
    truth = Machine(70e12, 2e9, 0.25, 0.02)
    form = FORMS["exchanges"]

    def residuals(machine):
        shares = [getattr(machine, name) / getattr(truth, name) for name in form.free]
        noise = random.Random(0)
        return [math.log(sum(noise.random() * x for x in shares) / 2) for _ in range(6)]

    target = residuals(truth)
    found = least_squares(
        lambda machine: [a - b for a, b in zip(residuals(machine), target, strict=True)], form, str
    )
    assert found.rms < 0.01
    for name in form.free:
        assert getattr(found.machine, name) == pytest.approx(getattr(truth, name), rel=0.05)


def test_what_is_kept_was_fitted_in_every_form():
    machines = fitted()
    assert machines.keys() == FORMS.keys()
    for name, form in FORMS.items():
        machine, rms = machines[name]
        fixed = asdict(machine).keys() - set(form.free)
        assert all(getattr(machine, one) == getattr(form.start, one) for one in fixed)
        assert 0 < rms < 1


def test_scores_are_of_the_held_out_rows():
    theirs = dict(zip(SCHEDULES, (4.0, 3.0, 2.0, 1.0), strict=True))
    slow = Scored("GPT3-Large 1/8/1", {name: 3 * x for name, x in theirs.items()}, theirs)
    near = Scored("GPT3-Large 2/8/1", dict(theirs, BF=2.2), theirs)
    assert held_out([slow, near]) == [near]
    assert times_error([slow]) == pytest.approx(2.0)
    assert ratios_error([slow]) == pytest.approx(0.0)
    assert ratios_error([near]) == pytest.approx(0.05)
    table = scores_table([near, slow])
    assert table.index("1/8/1 | fitted") < table.index("2/8/1 | held out")


def test_the_parts_of_a_gain_add_up():
    for one in taken_apart(MACHINE, ROW["GPT3-Large 1/8/1"]):
        assert sum(one.parts) == pytest.approx(1 - one.free / one.synchronous)
        assert one.parts[0] > 0
        assert one.held > 1
