"""Data: sources, splits, tasks, packing, the loader, the curriculum, and `prepare`, which runs them with a cache."""

from tlt_jax.data.curriculum import Curriculum
from tlt_jax.data.loader import Loader, held_out_batches, make_loader
from tlt_jax.data.packing import PackedRows, pack_documents, pack_examples, pack_sequences
from tlt_jax.data.prepare import Corpus, prepare
from tlt_jax.data.sources import Document
from tlt_jax.data.tasks import Tasks

__all__ = [
    "Corpus",
    "Curriculum",
    "Document",
    "Loader",
    "PackedRows",
    "Tasks",
    "held_out_batches",
    "make_loader",
    "pack_documents",
    "pack_examples",
    "pack_sequences",
    "prepare",
]
