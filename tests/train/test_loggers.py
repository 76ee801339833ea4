"""Loggers, read as their own tools do: TensorBoard's files, the record file of W&B, Prometheus' page."""

import dataclasses
import json
import math
import re
import socket
import struct
import sys
import threading
import zlib
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

import rrfp_jax as rrfp
from examples import prometheus
from rrfp_jax import loggers
from rrfp_jax.loggers import figures_of
from rrfp_jax.train.report import Evaluation, Report

KNOWN = {
    "step": 0,
    "loss": 2.0,
    "weight": 8.0,
    "metrics": {"accuracy": 0.5},
    "hyperparams": {"learning_rate": 0.125, "b1": 0.9},
    "step_seconds": 0.25,
    "wall_seconds": 0.5,
    "load_seconds": 0.0,
    "bubble": [0.25, 0.75],
    "gradient_norm": 3.0,
    "parameter_norm": 4.0,
    "loss_scale": 1.0,
    "skipped": 0,
    "peak_bytes": [1024, 2048],
}
REPORT = Report(**{item.name: None for item in dataclasses.fields(Report)} | KNOWN)
FIGURES = {
    "train/loss": 2.0,
    "train/accuracy": 0.5,
    "train/gradient_norm": 3.0,
    "train/parameter_norm": 4.0,
    "train/loss_scale": 1.0,
    "train/skipped": 0,
    "hyperparams/learning_rate": 0.125,  # and no constant beside it
    "speed/tokens_per_second": 16.0,
    "speed/step_seconds": 0.25,
    "speed/load_seconds": 0.0,
    "idle/stage_0": 0.25,
    "idle/stage_1": 0.75,
    "memory/stage_0_peak_bytes": 1024,
    "memory/stage_1_peak_bytes": 2048,
}
EVALUATION = Evaluation(loss=1.5, weight=8.0, metrics={"accuracy": 0.75})


def log(logger, steps):
    """Steps with a validation after the last."""
    for step in steps:
        report = dataclasses.replace(REPORT, step=step, loss=2.0 - step / 8)
        assert logger.on_step(report) is None
    assert logger.on_validation(report, EVALUATION) is None
    logger.close()
    logger.close()


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(rrfp.loggers.tensorboard(tmp_path), range(4))
    again = {"filename_suffix": ".again"}  # names of files have whole seconds
    log(rrfp.loggers.tensorboard(tmp_path, **again), range(2, 5))  # from a checkpoint of step 2 on
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    validation = {"validation/loss": [(4, 1.5)], "validation/accuracy": [(4, 0.75)]}
    assert found.pop("train/loss") == [(step, 2.0 - step / 8) for step in range(5)]
    expected = {name: [(step, value) for step in range(5)] for name, value in FIGURES.items()}
    del expected["train/loss"]
    assert found == expected | validation
    log(rrfp.loggers.tensorboard(tmp_path, filename_suffix=".anew"), range(2))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1], "from step 0 on"


def records(path):
    """The records of a W&B file: LevelDB's log format, the first block with a header of its own."""
    from wandb.proto import wandb_internal_pb2

    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := -at % 2**15) in range(1, 7):  # too little for a header: the block ends
            at += left
        checksum, size, kind = struct.unpack("<IHB", content[at : at + 7])
        part = content[at + 7 : at + 7 + size]
        assert checksum == zlib.crc32(bytes([kind]) + part)
        record = part if kind in (1, 2) else record + part  # 1 whole, 2 first, 3 middle, 4 last
        at += 7 + size
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)


def test_wandb_offline(tmp_path, monkeypatch):
    import wandb  # takes long, and every worker imports this file

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    logger = rrfp.loggers.wandb("tests", dir=tmp_path, mode="offline", config={"depth": 3})
    log(logger, range(3))
    wandb.teardown()  # its process ends, and has written everything then
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history = [record.history for record in records(file) if record.HasField("history")]
    lines = {}
    for line in history:
        own = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in line.item}
        lines[own.pop("_step")] = {name: value for name, value in own.items() if not name.startswith("_")}
    assert sorted(lines) == [0, 1, 2]
    assert lines[0] == FIGURES
    validation = {"validation/loss": 1.5, "validation/accuracy": 0.75}
    assert lines[2] == FIGURES | {"train/loss": 1.75} | validation


@pytest.fixture
def port():
    """One that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def asked(port):
    """What Prometheus is told: families by name, their samples by name and labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(family.documentation for family in families)
    types = {family.name: family.type for family in families}
    return types, {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_prometheus(port):
    threads = threading.active_count()
    logger = prometheus.prometheus(port)
    assert asked(port)[1]["rrfp_step_seconds_count",] == 0, "it answers before the first step"
    for step in range(3):
        logger.on_step(dataclasses.replace(REPORT, step=step, loss=2.0 - step / 8, load_seconds=0.5))
    types, samples = asked(port)
    assert samples["rrfp_step",] == 2 and samples["rrfp_loss",] == 1.75
    assert samples["rrfp_metric", "accuracy"] == 0.5
    assert samples["rrfp_hyperparameter", "learning_rate"] == 0.125
    assert ("rrfp_hyperparameter", "b1") not in samples
    assert samples["rrfp_tokens_per_second",] == 16.0 and samples["rrfp_load_seconds_total",] == 1.5
    assert [samples["rrfp_stage_idle_ratio", str(stage)] for stage in range(2)] == [0.25, 0.75]
    assert [samples["rrfp_stage_peak_bytes", str(stage)] for stage in range(2)] == [1024, 2048]
    assert samples["rrfp_step_seconds_sum",] == 0.75 and samples["rrfp_step_seconds_count",] == 3
    assert samples["rrfp_step_seconds_bucket", "0.2"] == 0 and samples["rrfp_step_seconds_bucket", "0.5"] == 3
    assert types["rrfp_step_seconds"] == "histogram" and types["rrfp_load_seconds"] == "counter"
    assert types["rrfp_stage_idle_ratio"] == types["rrfp_loss"] == "gauge"
    logger.on_validation(REPORT, EVALUATION)
    samples = asked(port)[1]
    assert samples["rrfp_validation_loss",] == 1.5 and samples["rrfp_validation_metric", "accuracy"] == 0.75
    logger.close()
    logger.close()
    assert threading.active_count() == threads
    with pytest.raises(OSError, match="refused"):
        asked(port)
    again = prometheus.prometheus(port)  # at once
    assert ("rrfp_metric", "accuracy") not in asked(port)[1]
    again.close()


def test_every_figure_has_a_family():
    for name in figures_of(dataclasses.replace(REPORT, hyperparams={"momentum": 0.5})):
        family, labels = prometheus._family_of(name)
        assert len(labels) == (family.label is not None), name
    assert len({family.name for family in prometheus.FAMILIES}) == len(prometheus.FAMILIES)


def test_figures_that_are_not_finite_are_told(port):
    logger = prometheus.prometheus(port)
    logger.on_step(dataclasses.replace(REPORT, loss=float("nan"), gradient_norm=float("inf")))
    samples = asked(port)[1]
    assert math.isnan(samples["rrfp_loss",]) and math.isinf(samples["rrfp_gradient_norm",])
    logger.close()


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = f"port={port}, address='127.0.0.1': Address already in use; give another port"
        with pytest.raises(rrfp.UsageError, match=said):
            prometheus.prometheus(port)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0,), "port=0: give a number from 1 to 65535"),
        ((2**16,), "port=65536: give a number"),
        ((True,), "port=True: give a number"),
        (("9090",), "port='9090': give a number"),
        ((9090, "192.0.2.1"), "port=9090, address='192.0.2.1': Cannot assign requested address"),
    ],
)
def test_what_nothing_can_listen_on(given, said):
    with pytest.raises(rrfp.UsageError, match=f"^prometheus: {re.escape(said)}"):
        prometheus.prometheus(*given)


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tensorboardX", lambda: rrfp.loggers.tensorboard("x")),
        ("wandb", lambda: rrfp.loggers.wandb("x")),
        ("prometheus_client", lambda: prometheus.prometheus(9090)),
    ],
)
def test_a_package_that_is_not_there(monkeypatch, package, make):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(rrfp.UsageError, match=rf"(loggers|prometheus)\..* {package}.*pip install {package}"):
        make()


def test_hyperparameters_are_written_from_their_first_change_on():
    written = []
    sink = loggers.Sink(lambda step, figures: written.append({*figures} - {*FIGURES}), lambda: None)
    logger = loggers.Logger(lambda step: sink)
    for momentum in (0.5, 0.5, 0.75, 0.5, 0.5):
        hyperparams = {"learning_rate": 0.125, "momentum": momentum, "b1": 0.9}
        logger.on_step(dataclasses.replace(REPORT, hyperparams=hyperparams))
    assert written == [set(), set()] + [{"hyperparams/momentum"}] * 3


def test_a_run_that_begins_anew_has_a_place_of_its_own():
    written = []

    def make(first):
        return loggers.Sink(
            lambda step, figures: written.append((first, step)), lambda: written.append("end")
        )

    logger = loggers.Logger(make)
    for step in (0, 1, 0, 1):
        logger.on_step(dataclasses.replace(REPORT, step=step))
        logger.on_validation(dataclasses.replace(REPORT, step=step), EVALUATION)
    first, second = [(0, 0)] * 2, [(0, 1)] * 2
    assert written == [*first, *second, "end", *first, *second]


def test_other_ranks_write_nothing(monkeypatch, tmp_path):
    other = lambda: type("World", (), {"rank": 1})  # noqa: E731
    monkeypatch.setattr("rrfp_jax.loggers.join", other)
    log(rrfp.loggers.tensorboard(tmp_path / "none"), range(2))
    assert not (tmp_path / "none").exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:  # by rank 0
        log(prometheus.prometheus(taken.getsockname()[1]), range(2))


def test_a_folder_that_is_none():
    with pytest.raises(rrfp.UsageError, match=r"loggers\.tensorboard: folder=5"):
        rrfp.loggers.tensorboard(5)
