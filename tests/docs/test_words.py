"""The pages are short, and what people look for is on them."""

import pytest

from tests.docs import words

README, ALL = 700, 30_000
"""Most words."""

TERMS = [
    *(
        "1F1B",
        "activation checkpointing",
        "checkpoint",
        "CUDA",
        "data parallelism",
        "FAQ",
        "fine-tuning",
        "FSDP",
    ),
    *("gradient accumulation", "install", "interleaved", "JaxPP", "MaxText", "Megatron", "MFU"),
    *(
        "mixed precision",
        "multi-node",
        "NCCL",
        "pipeline parallelism",
        "profiler",
        "rematerialization",
        "SLURM",
    ),
    *("tensor parallelism", "torch.distributed.pipelining", "TPU", "ZeRO-1", "zero bubble"),
]
"""Words of the field, not ours."""


@pytest.fixture(scope="module")
def counts():
    return words.counted(words.now)


def test_pages_are_short(counts):
    assert len(counts) > 30
    assert counts["README.md"] <= README
    assert sum(counts.values()) <= ALL, "python -m tests.docs.words"


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_field_is_on_a_page(term, counts):
    assert [page for page in counts if term.lower() in words.now(page).lower()], term
