"""`QuantHashEmbeddingBagCollection`, `QuantHashEmbeddingCollection`: hashed collections as they are served.

They take the place that TorchRec's quantised modules have in `quantize_dynamic`, `torchrec.fx.Tracer` and
`torch.jit.script`, and take and give what the collections that they were made from do.
"""

# No ``from __future__ import annotations``: torch.jit reads the annotations of the classes as they are.
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.jit import is_scripting  # type: ignore[attr-defined]  # public, but not listed where mypy looks
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from hybridrec.config import TableConfig, embedding_names
from hybridrec.errors import IdError
from hybridrec.inference.frozen_tables import FrozenSequences, FrozenTable, FrozenTables, positions_of_features
from hybridrec.inference.report import FreezeReport
from hybridrec.inference.row_format import RowFormat
from hybridrec.modules.input_check import check_features

DATA_TYPES = {
    RowFormat.FP32: DataType.FP32,
    RowFormat.FP16: DataType.FP16,
    RowFormat.INT8: DataType.INT8,
    RowFormat.INT4: DataType.INT4,
}
"""TorchRec's names."""


@dataclass(frozen=True, kw_only=True)
class FrozenParts:
    """What a frozen collection is made of."""

    configs: tuple[TableConfig, ...]
    """In the order of the collection."""
    formats: tuple[RowFormat, ...]
    """Of their rows."""
    tables: tuple[FrozenTable, ...]
    """Their rows."""
    report: FreezeReport
    """Sizes and errors."""
    is_weighted: bool = False
    """Of pooled collections: whether batches carry a weight for each id."""
    need_indices: bool = False
    """Of sequences: whether outputs carry their ids."""
    output_dtype: torch.dtype = torch.float32
    """Of the outputs; sums are float32."""


@torch.fx.wrap
def arranged(features: KeyedJaggedTensor, names: list[str], is_weighted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(ids int64 [N], lengths int64 [F * B], weights [N] or None) of the named features, in their order."""
    keys = features.keys()
    values, lengths = features.values(), features.lengths()
    weights = features.weights_or_none() if is_weighted else None
    if keys != names:
        lengths_FB = lengths.view(len(keys), -1)
        order = [keys.index(name) for name in names]
        positions = positions_of_features(values, lengths_FB)
        positions_N = torch.cat([positions[k] for k in order])
        values = values.index_select(0, positions_N)
        weights = None if weights is None else weights.index_select(0, positions_N)
        lengths = torch.cat([lengths_FB[k] for k in order])
    return values.to(torch.int64), lengths.to(torch.int64), weights


@torch.fx.wrap
def keyed_tensor(names: list[str], dims: list[int], values: Tensor) -> KeyedTensor:
    """Opaque to `torch.fx`, which makes no objects."""
    return KeyedTensor(keys=names, length_per_key=dims, values=values)


@torch.fx.wrap
def jagged_tensors(
    names: list[str], of_feature: list[int], rows: Tensor, values: Tensor, lengths_FB: Tensor, need_indices: bool
) -> dict[str, JaggedTensor]:
    """One JaggedTensor an output: its part of the rows, its feature's lengths and, if needed, ids."""
    counts: list[int] = lengths_FB.sum(1).tolist()
    ids = torch.split(values, counts)
    parts = torch.split(rows, [counts[f] for f in of_feature])
    outputs: dict[str, JaggedTensor] = {}
    for k in range(len(names)):
        f = of_feature[k]
        outputs[names[k]] = JaggedTensor(
            values=parts[k], lengths=lengths_FB[f], weights=ids[f] if need_indices else None
        )
    return outputs


class QuantHashEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Pooled lookups in frozen tables; made by `hybridrec.inference.freeze`, `load` or `quantize_dynamic`.

    Attributes:
        tables: `FrozenTables`, what to save for a process without TorchRec: ``torch.jit.script(module.tables)``.
        report: `FreezeReport`, sizes and errors.
    """

    has_weights: Final[bool]
    __jit_unused_properties__ = ["device"]

    def __init__(self, parts: FrozenParts) -> None:
        super().__init__()
        self.tables = FrozenTables(parts.configs, parts.tables, is_weighted=parts.is_weighted)
        self.report, self.parts = parts.report, _Unseen(parts)
        self.has_weights, self.output_dtype = parts.is_weighted, parts.output_dtype
        self._configs = [EmbeddingBagConfig(**fields) for fields in _config_fields(parts, is_pooled=True)]
        self.eval()

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> "QuantHashEmbeddingBagCollection":
        """What `quantize_dynamic` calls. ``module``: a `HashEmbeddingBagCollection` with a ``qconfig``.

        Raises:
            ConfigError: A dtype of the `QuantConfig` is not available, or a row cannot be held by it.
        """
        from hybridrec.inference.freeze import freeze_from_qconfig

        return cast(QuantHashEmbeddingBagCollection, freeze_from_qconfig(module))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool.

        Args:
            features: As for the collection that was frozen, on `device`; variable batches (VBE) are not served.

        Returns:
            KeyedTensor [B, sum of D over outputs], in the collection's order.

        Raises:
            IdError: See `check_features`; the batch is variable. (A traced or scripted module checks less.)
        """
        if not is_scripting():
            self.parts.check(features, type(self).__name__)
        values, lengths, weights = arranged(features, self.tables.feature_names, self.has_weights)
        pooled = self.tables(values, lengths, weights)
        return keyed_tensor(self.tables.output_names, self.tables.output_dims, pooled.to(self.output_dtype))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, with the type of their rows."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether batches must carry a weight for each id."""
        return self.has_weights

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return next(self.tables.buffers()).device


class QuantHashEmbeddingCollection(EmbeddingCollectionInterface):
    """Rows of frozen tables, not pooled; made by `hybridrec.inference.freeze`, `load` or `quantize_dynamic`.

    Attributes:
        tables: `FrozenSequences`, what to save for a process without TorchRec.
        report: `FreezeReport`, sizes and errors.
    """

    has_indices: Final[bool]
    __jit_unused_properties__ = ["device"]

    def __init__(self, parts: FrozenParts) -> None:
        super().__init__()
        self.tables = FrozenSequences(parts.configs, parts.tables)
        self.report, self.parts = parts.report, _Unseen(parts)
        self.has_indices, self.output_dtype = parts.need_indices, parts.output_dtype
        self._configs = [EmbeddingConfig(**fields) for fields in _config_fields(parts, is_pooled=False)]
        self._names = embedding_names(parts.configs)
        self.eval()

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> "QuantHashEmbeddingCollection":
        """What `quantize_dynamic` calls. ``module``: a `HashEmbeddingCollection` with a ``qconfig``.

        Raises:
            ConfigError: A dtype of the `QuantConfig` is not available, or a row cannot be held by it.
        """
        from hybridrec.inference.freeze import freeze_from_qconfig

        return cast(QuantHashEmbeddingCollection, freeze_from_qconfig(module))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up.

        Args:
            features: As for the collection that was frozen, on `device`.

        Returns:
            Name of the output -> JaggedTensor [ids of the feature, D], as the collection's.

        Raises:
            IdError: See `check_features`; the batch is variable. (A traced or scripted module checks less.)
        """
        if not is_scripting():
            self.parts.check(features, type(self).__name__)
        values, lengths, _ = arranged(features, self.tables.feature_names, False)
        rows = self.tables(values, lengths).to(self.output_dtype)
        lengths_FB = lengths.view(self.tables.num_features, -1)
        return jagged_tensors(
            self.tables.output_names, self.tables.output_features, rows, values, lengths_FB, self.has_indices
        )

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, with the type of their rows."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether outputs carry their ids."""
        return self.has_indices

    def embedding_dim(self) -> int:
        """D, of all tables."""
        return int(self._configs[0].embedding_dim)

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the outputs of each table."""
        return self._names

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return next(self.tables.buffers()).device


class _Unseen:
    """The parts of a module, out of sight of `torch.jit` and `torch.fx`."""

    def __init__(self, parts: FrozenParts) -> None:
        self.configs, self.formats, self.is_weighted = parts.configs, parts.formats, parts.is_weighted

    def check(self, features: Any, where: str) -> None:
        """Refuse what cannot be served; a proxy of a trace says nothing that could be checked."""
        if isinstance(features, torch.fx.Proxy):
            return
        check_features(features, self.configs, self.is_weighted, where)
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise IdError(
                f"{where}: the batch is variable (stride_per_key_per_rank or inverse_indices), which frozen tables do "
                "not serve. Pass a KeyedJaggedTensor with one stride and no inverse_indices."
            )


def _config_fields(parts: FrozenParts, *, is_pooled: bool) -> list[dict[str, Any]]:
    """What TorchRec's configs of the tables say."""
    return [
        {
            "name": config.name,
            "num_embeddings": config.num_embeddings,
            "embedding_dim": config.embedding_dim,
            "feature_names": list(config.feature_names),
            "data_type": DATA_TYPES[row_format],
            **({"pooling": config.pooling} if is_pooled else {}),
        }
        for config, row_format in zip(parts.configs, parts.formats, strict=True)
    ]
