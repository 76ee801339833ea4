"""Data for Trainers: text as windows of bytes, documents of natural length, with images, or from elsewhere.

`Documents` reads a source (`TextFiles`, `JsonLines`, `TokenFile`, `Examples`, `hugging_face`) by a tokenizer
(`Bytes`, `TokenizerFile`, `SentencePiece`) into buckets that are given or fitted (`Fit`); see `docs/data.md`.
`ImageDocuments` does so with documents of text and images; see `docs/multimodal.md`.
"""

from rrfp_jax.data.balance import Polynomial, Table
from rrfp_jax.data.buckets import Fit
from rrfp_jax.data.corpus import Corpus, write_tokens
from rrfp_jax.data.documents import Documents
from rrfp_jax.data.glyphs import Glyphs
from rrfp_jax.data.illustrated import ImageExamples, ImageFolder, ImageLines
from rrfp_jax.data.image_corpus import ImageCorpus
from rrfp_jax.data.image_documents import ImageDocuments
from rrfp_jax.data.images import Patches
from rrfp_jax.data.sources import Examples, JsonLines, TextFiles, hugging_face
from rrfp_jax.data.stream import Stream
from rrfp_jax.data.text import ByteText
from rrfp_jax.data.tokenizers import Bytes, SentencePiece, TokenizerFile
from rrfp_jax.data.tokens import TokenFile
from rrfp_jax.data.two_lengths import Costs, FitBoth

__all__ = [
    "ByteText",
    "Bytes",
    "Corpus",
    "Costs",
    "Documents",
    "Examples",
    "Fit",
    "FitBoth",
    "Glyphs",
    "ImageCorpus",
    "ImageDocuments",
    "ImageExamples",
    "ImageFolder",
    "ImageLines",
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
