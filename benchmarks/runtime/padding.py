"""Padding of documents in fitted buckets and packed, on the standard library's text, and what planning takes.

    python -m benchmarks.runtime.padding [--json=FILE] [--check]

Documents are files, or sections between blank lines; those longer than the longest bucket are split. Every
byte is counted over the rows of both splits: all but the first of each document must be predicted once.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import rrfp_jax as rrfp
from benchmarks.harness import Aim, finish, parse
from rrfp_jax.data.contract import plan_hash
from rrfp_jax.runs.config import load_config

BUCKETS, LONGEST, STEPS = 6, (256, 512, 1024, 2048), 100


def main() -> int:
    """Measure, print, write."""
    options = parse(__doc__).parse_args()
    warnings.simplefilter("ignore", UserWarning)  # three empty files
    rows = []
    for unit, longest, packed in itertools.product(("file", "section"), LONGEST, (False, True)):
        rows.append(row := measure(documents(unit, longest, packed)))
        row |= {"document": unit, "longest": longest, "packed": packed}
        print(
            f"{unit:7} up to {longest:4}, {'packed' if packed else 'padded'}: "
            f"padding {row['padding_percent']:5.2f} %, buckets {row['buckets']}, {row['rows']} rows, "
            f"first plan {row['first_plan_ms']:.0f} ms, then {row['plan_ms']:.2f} ms, "
            f"load {row['load_ms']:.2f} ms a step",
            flush=True,
        )
    files = [row for row in rows if row["document"] == "file" and not row["packed"]]
    run = load_config("configs/gpt_lengths.py").train_data()
    hashes = {hash_elsewhere(seed) for seed in (1, 2)} | {plan_hash(documents().plan(STEPS))}
    aims = [
        Aim("worst padding of files in 6 buckets", max(r["padding_percent"] for r in files), 8.0, "%"),
        Aim("padding of configs/gpt_lengths.py", 100 * run.padding, 8.0, "%"),
        Aim("bytes not predicted exactly once", sum(r["bytes_lost"] for r in rows), 0, "bytes"),
        Aim("different plans of one step in three processes", len(hashes), 1, "hashes"),
        Aim("planning a step of 16 microbatches", max(r["plan_ms"] for r in rows), 10.0, "ms"),
    ]
    return finish(options, {"cases": rows}, aims)


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


def hash_elsewhere(seed: int) -> str:
    """The same plan's hash as a process with other hashes of strings finds it."""
    code = (
        "import warnings; warnings.simplefilter('ignore'); from benchmarks.runtime.padding import *; "
        "print(plan_hash(documents().plan(STEPS)))"
    )
    env = os.environ | {"PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
