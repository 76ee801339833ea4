"""Padding of documents in fitted buckets and packed, on the standard library's text, and what planning
takes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, on_ranks, say
from rrfp_jax.data.contract import plan_hash
from rrfp_jax.runs.config import load_config

BUCKETS, LONGEST, STEPS = 6, (256, 512, 1024, 2048), 100


def documents(unit: Any = "file", longest: int = 1024, packed: bool = False) -> rrfp.data.Documents:
    """The training documents, 2,048 bytes a microbatch; packed rows need one bucket only."""
    corpus = rrfp.data.Corpus(
        source=rrfp.data.TextFiles("", unit), tokenizer=rrfp.data.Bytes(), vocabulary=256, bad="skip"
    )
    lengths = (longest,) if packed else rrfp.data.Fit(buckets=BUCKETS, longest=longest)
    return rrfp.data.Documents(corpus=corpus, lengths=lengths, tokens=2048, microbatches=16, packed=packed)


def measure(data: rrfp.data.Documents) -> dict[str, Any]:
    """Padding, bytes lost and times of one case, over training and validation documents."""
    began = perf_counter()
    data.plan(0)
    first = perf_counter() - began
    plans, loads = [], []
    for step in range(STEPS):
        began = perf_counter()
        plan = data.plan(step)
        planned = perf_counter()
        for mb in plan:
            data.load(mb, mb.fields)
        plans.append(planned - began)
        loads.append(perf_counter() - planned)
    held = replace(data, split="validation")
    return {
        "buckets": data.bucket_lengths,
        "rows": len(data.rows_of_split.size),
        "padding_percent": 100 * data.padding,
        "bytes_lost": lost(data, held),
        "first_plan_ms": 1e3 * first,
        "plan_ms": 1e3 * median(plans),
        "load_ms": 1e3 * median(loads),
    }


def lost(*splits: rrfp.data.Documents) -> int:
    """Bytes that the rows of all splits together do not predict, or predict again.

    The first byte of a document cannot be predicted; every other one must be, once.
    """
    labels = splits[0].corpus.lengths.labels
    lengths = labels + (labels > 0)
    first = np.cumsum(lengths) - lengths
    times = np.zeros(int(lengths.sum()), np.int64)
    for data in splits:
        for piece in data.rows_of_split.order.tolist():
            begin = first[data.pieces.document[piece]] + data.pieces.begin[piece] + 1
            times[begin : begin + data.pieces.size[piece]] += 1
    times[first[lengths > 0]] += 1
    return int((times != 1).sum())


def plan_elsewhere() -> str:
    """The hash of a step's plan, in a process with other hashes of strings."""
    warnings.simplefilter("ignore")
    return plan_hash(documents().plan(STEPS))


@bench(
    "How much padding do fitted buckets and packing leave?",
    minutes="2 *",
    aims="8 % padding; every byte predicted once; one plan in all processes, in 10 ms",
)
def padding(longest: tuple[int, ...] = LONGEST) -> Found:
    """Documents of the standard library are files, or sections between blank lines; those longer than the
    longest bucket are split. Every byte is counted over the rows of both splits: all but the first of each
    document must be predicted once. Beside it, what planning and loading take."""
    warnings.simplefilter("ignore", UserWarning)  # three empty files
    rows: list[dict[str, Any]] = []
    for unit, size, packed in product(("file", "section"), longest, (False, True)):
        about = {"document": unit, "longest": size, "packed": packed}
        rows.append(row := about | measure(documents(unit, size, packed)))
        say(row)
    files = [row for row in rows if row["document"] == "file" and not row["packed"]]
    run = load_config("configs/gpt_lengths.py").train_data()
    seeds = [{"PYTHONHASHSEED": seed} for seed in ("1", "2")]
    hashes = {on_ranks(0, plan_elsewhere, seconds=300, env=env) for env in seeds} | {plan_elsewhere()}
    return Found(
        {"cases": rows},
        [
            Aim("worst padding of files in 6 buckets", max(r["padding_percent"] for r in files), 8.0, "%"),
            Aim("padding of configs/gpt_lengths.py", 100 * run.padding, 8.0, "%"),
            Aim("bytes not predicted exactly once", sum(r["bytes_lost"] for r in rows), 0, "bytes"),
            Aim("different plans of one step in three processes", len(hashes), 1, "hashes"),
            Aim("planning a step of 16 microbatches", max(r["plan_ms"] for r in rows), 10.0, "ms"),
        ],
    )
