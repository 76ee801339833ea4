"""Data for Trainers: text as windows of bytes, documents of natural length, microbatches from elsewhere.

`Documents` reads a source (`TextFiles`, `JsonLines`, `TokenFile`, `Examples`, `hugging_face`) by a tokenizer
(`Bytes`, `TokenizerFile`, `SentencePiece`) into buckets that are given or fitted (`Fit`); see `docs/data.md`.
"""

from rrfp_jax.corpus.balance import Polynomial, Table
from rrfp_jax.corpus.buckets import Fit
from rrfp_jax.corpus.corpus import Corpus, write_tokens
from rrfp_jax.corpus.sources import Examples, JsonLines, TextFiles, hugging_face
from rrfp_jax.corpus.tokenizers import Bytes, SentencePiece, TokenizerFile
from rrfp_jax.corpus.tokens import TokenFile
from rrfp_jax.train.documents import Documents
from rrfp_jax.train.stream import Stream
from rrfp_jax.train.text import ByteText

__all__ = [
    "ByteText",
    "Bytes",
    "Corpus",
    "Documents",
    "Examples",
    "Fit",
    "JsonLines",
    "Polynomial",
    "SentencePiece",
    "Stream",
    "Table",
    "TextFiles",
    "TokenFile",
    "TokenizerFile",
    "hugging_face",
    "write_tokens",
]
