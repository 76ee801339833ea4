"""Data for Trainers: text as windows of bytes, documents of natural length, with images, or from elsewhere.

`Documents` reads a source (`TextFiles`, `JsonLines`, `TokenFile`, `Examples`, `hugging_face`) by a tokenizer
(`Bytes`, `TokenizerFile`, `SentencePiece`) into buckets that are given or fitted (`Fit`); see `docs/data.md`.
With `Corpus(patches=...)` documents are of text and images; see `docs/multimodal.md`.
"""

from rrfp_jax.data.buckets import Costs, Fit, Polynomial, Table
from rrfp_jax.data.byte_text import ByteText
from rrfp_jax.data.contract import Stream
from rrfp_jax.data.corpus import Corpus, write_tokens
from rrfp_jax.data.documents import Documents
from rrfp_jax.data.images import Patches
from rrfp_jax.data.sources import Examples, ImageFolder, JsonLines, TextFiles, TokenFile, hugging_face
from rrfp_jax.data.tokenizers import Bytes, SentencePiece, TokenizerFile

__all__ = [
    "ByteText",
    "Bytes",
    "Corpus",
    "Costs",
    "Documents",
    "Examples",
    "Fit",
    "ImageFolder",
    "JsonLines",
    "Patches",
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
