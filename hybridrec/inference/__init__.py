"""Serving: frozen, quantised tables whose lookup needs torch alone. See docs/inference.md."""

from hybridrec.inference.freeze import freeze, load, set_unknown_row
from hybridrec.inference.frozen_tables import FrozenSequences, FrozenTable, FrozenTables
from hybridrec.inference.quant_collections import QuantHashEmbeddingBagCollection, QuantHashEmbeddingCollection
from hybridrec.inference.report import FreezeReport, TableReport

__all__ = [
    "FreezeReport",
    "FrozenSequences",
    "FrozenTable",
    "FrozenTables",
    "QuantHashEmbeddingBagCollection",
    "QuantHashEmbeddingCollection",
    "TableReport",
    "freeze",
    "load",
    "set_unknown_row",
]
