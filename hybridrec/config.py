"""Table configurations: what users write, and the resolved form that everything below reads."""

from __future__ import annotations

import collections
import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)

from hybridrec.errors import ConfigError
from hybridrec.row_type import RowType
from hybridrec.store.initializer import Bank, Constant, Normal, Uniform, bank_from_init_fn
from hybridrec.types import FullPolicy

MAX_EMBEDDING_DIM = 2048
"""Most columns a row may have."""
NOMINAL_BYTES_LIMIT = 2**63
"""torch counts a tensor's bytes in int64, also on the meta device: a nominal parameter must stay below."""
DEFAULT_INITIALIZER = Uniform(-0.01, 0.01)
"""Of tables that choose none. TorchRec's ``sqrt(1 / num_embeddings)`` means nothing where that number is nominal."""

_ROW_TYPES = {DataType.FP32: RowType.FLOAT32, DataType.BF16: RowType.BFLOAT16, DataType.FP16: RowType.FLOAT16}

Initializer = Uniform | Normal | Constant | Bank

_UNSUPPORTED_FIELDS: dict[str, Any] = {
    "num_embeddings_post_pruning": None,
    "need_pos": False,
    "input_dim": None,
    "total_num_buckets": None,
    "use_virtual_table": False,
    "virtual_table_eviction_policy": None,
    "enable_embedding_update": False,
    "stash_weights": False,
}
"""Fields of TorchRec's config that hashed tables do not honour -> the value that asks for nothing."""


class _DefaultInitFn(functools.partial[Any]):
    """The ``init_fn`` that we fill in as TorchRec does; its type tells that the user gave none."""


@dataclass
class _HashFields:
    """What a hashed table's config has beyond TorchRec's; keyword-only."""

    planned_rows: int | None = field(default=None, kw_only=True)
    """Rows expected to live, over all ranks: what plans account. None: ``num_embeddings``. No limit."""
    max_rows: int | None = field(default=None, kw_only=True)
    """Most rows, over all ranks; each rank has a quota of ``ceil(max_rows / W)``. None: no limit."""
    full_policy: FullPolicy | str = field(default=FullPolicy.GROW, kw_only=True)
    """What a new id meets at the quota: ``"grow"`` (no quota), ``"evict"`` or ``"error"``."""
    device_rows: int | None = field(default=None, kw_only=True)
    """Rows a rank keeps on its device when the plan caches the table. None: as the plan's load factor says."""
    seed: int = field(default=0, kw_only=True)
    """Of the initial rows, with the table's name."""
    initializer: Uniform | Normal | Constant | None = field(default=None, kw_only=True)
    """Distribution of the initial rows."""

    def __post_init__(self) -> None:
        """Check the config, and fill in ``init_fn`` so that TorchRec's own modules accept it too."""
        config = cast(BaseEmbeddingConfig, self)
        if isinstance(config.init_fn, _DefaultInitFn):  # of the config that this one was made from by `replace`
            config.init_fn = None
        _Fields(config).check()
        if config.init_fn is None:
            low, high = config.get_weight_init_min(), config.get_weight_init_max()
            config.init_fn = _DefaultInitFn(torch.nn.init.uniform_, a=low, b=high)


@dataclass
class HashEmbeddingBagConfig(_HashFields, EmbeddingBagConfig):
    """One hashed table whose ids are any int64 values: TorchRec's config and what a hashed table needs beyond it.

    Positional parameters are those of `EmbeddingBagConfig`; what is added is keyword-only. Initial rows come from
    the first of these that is given; giving two is an error:

    1. ``initializer``;
    2. ``weight_init_min`` and ``weight_init_max``, as ``Uniform``;
    3. ``init_fn``: rows are taken, by a hash of the id, from a bank of rows that it fills once;
    4. none: ``Uniform(-0.01, 0.01)``. TorchRec's default range, ``sqrt(1 / num_embeddings)``, is not used, because
       ``num_embeddings`` is nominal here.

    Raises:
        ConfigError: A value is not accepted; names table, field, value and what to do.
    """


@dataclass
class HashEmbeddingConfig(_HashFields, EmbeddingConfig):
    """One hashed table of a `HashEmbeddingCollection`, whose rows are not pooled.

    TorchRec's `EmbeddingConfig` and the fields of `HashEmbeddingBagConfig` beyond it, with the same meaning and errors.
    """


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One table, checked and with its defaults filled in."""

    name: str
    """Unique in its collection."""
    num_embeddings: int
    """Nominal rows: the shape of the parameter that TorchRec sees."""
    embedding_dim: int
    """D."""
    feature_names: tuple[str, ...]
    """Features that look rows up here, in output order."""
    pooling: PoolingType
    """SUM or MEAN; NONE in a collection of sequences."""
    planned_rows: int
    """Rows expected to live, over all ranks."""
    max_rows: int | None
    """Most rows over all ranks, or None."""
    full_policy: FullPolicy
    """What happens to a new id at the quota."""
    device_rows: int | None
    """Rows a rank keeps on its device, or None."""
    seed: int
    """Of the initial rows, int64."""
    initializer: Initializer
    """Of the initial rows."""
    row_type: RowType = RowType.FLOAT32
    """Of the rows' weights."""


def resolve_table(config: BaseEmbeddingConfig, kind: type[BaseEmbeddingConfig] = EmbeddingBagConfig) -> TableConfig:
    """Check one config and fill in its defaults. The config is read, never changed.

    Args:
        config: A hashed config, or TorchRec's, which has the defaults of what it lacks.
        kind: `EmbeddingBagConfig` for pooled tables, `EmbeddingConfig` for sequences.

    Returns:
        TableConfig with every field decided.

    Raises:
        ConfigError: A value is not accepted; names table, field, value and what to do.
    """
    if not isinstance(config, kind):
        raise ConfigError(
            f"tables: {config!r} has type {type(config).__name__}. Pass Hash{kind.__name__} or {kind.__name__}."
        )
    fields = _Fields(config)
    fields.check()
    return fields.resolve()


def resolve_tables(
    tables: Sequence[BaseEmbeddingConfig], kind: type[BaseEmbeddingConfig] = EmbeddingBagConfig
) -> tuple[TableConfig, ...]:
    """Check the tables of one collection, each and together; ``kind`` as for `resolve_table`.

    Raises:
        ConfigError: Not a list, empty, a table is not accepted, or two tables or outputs have the same name.
    """
    if not isinstance(tables, (list, tuple)):
        raise ConfigError(
            f"tables: got {type(tables).__name__}. Pass a list of Hash{kind.__name__}, also for a single table."
        )
    if not tables:
        raise ConfigError(f"tables: the list is empty. A collection needs at least one Hash{kind.__name__}.")
    resolved = tuple(resolve_table(table, kind) for table in tables)
    _check_unique("table name", [table.name for table in resolved])
    _check_unique("output name", [name for names in embedding_names(resolved) for name in names])
    _check_no_columns([table.name for table in resolved])
    return resolved


def _check_no_columns(names: Sequence[str]) -> None:
    """A snapshot calls columns 0 to 7 of a table ``t`` that is cut ``t[0:8]``."""
    for name in names:
        found = re.fullmatch(r"(.+)\[\d+:\d+\]", name, re.DOTALL)
        if found is not None and found[1] in names:
            raise ConfigError(
                f"table {name!r} has the name of columns of table {found[1]!r} in a snapshot. Give it another name."
            )


def embedding_names(tables: Sequence[TableConfig]) -> list[list[str]]:
    """Names of the outputs of each table: ``feature``, or ``feature@table`` if several tables use the feature.

    Source: TorchRec 1.8 ``get_embedding_names_by_table``, same rule.
    """
    uses = collections.Counter(feature for table in tables for feature in table.feature_names)
    return [[f"{f}@{table.name}" if uses[f] > 1 else f for f in table.feature_names] for table in tables]


def shard_rows(planned_rows: int, world_size: int) -> int:
    """Rows that one rank plans for: its share, and four standard deviations of what hashing adds to it.

    Args:
        planned_rows: Over all ranks.
        world_size: W.

    Returns:
        ``min(p, ceil(p / W) + ceil(4 * sqrt(p / W)))``, exact for any int; p itself at W = 1.
    """
    if world_size == 1:
        return planned_rows
    share = -(-planned_rows // world_size)
    margin = math.isqrt(-(-16 * planned_rows // world_size) - 1) + 1  # ceil(sqrt(16 p / W))
    return min(planned_rows, share + margin)


def shard_quota(max_rows: int, world_size: int) -> int:
    """Rows that one rank may hold: ``ceil(max_rows / W)``."""
    return -(-max_rows // world_size)


class _Fields:
    """One user's config, read field by field; names the table in every error."""

    def __init__(self, config: BaseEmbeddingConfig) -> None:
        self._config = config
        self._where = f"table {config.name!r}"

    def check(self) -> None:
        """Check everything that can be checked without drawing a row."""
        self._check_name()
        self._num_embeddings()
        self._features()
        self._check_kind()
        self._count("planned_rows")
        self._count("device_rows")
        self._capacity()
        self._seed()
        if self._initializer_source() != "init_fn":
            self._check_largest(self._initializer(self._int("embedding_dim")))

    def resolve(self) -> TableConfig:
        """The resolved table. Call `check` first."""
        config = self._config
        num_embeddings = self._num_embeddings()
        dim = self._int("embedding_dim")
        max_rows, full_policy = self._capacity()
        return TableConfig(
            name=config.name,
            num_embeddings=num_embeddings,
            embedding_dim=dim,
            feature_names=self._features(),
            pooling=_pooling(config),
            planned_rows=self._count("planned_rows") or num_embeddings,
            max_rows=max_rows,
            full_policy=full_policy,
            device_rows=self._count("device_rows"),
            seed=self._seed(),
            initializer=self._check_largest(self._initializer(dim)),
            row_type=_ROW_TYPES[config.data_type],
        )

    def _error(self, field_name: str, problem: str, remedy: str) -> ConfigError:
        value = getattr(self._config, field_name)
        return ConfigError(f"{self._where}: {field_name}={value!r} {problem}. {remedy}")

    def _int(self, field_name: str) -> int:
        value = getattr(self._config, field_name)
        try:
            if isinstance(value, (bool, Tensor)):
                raise TypeError
            return operator.index(value)
        except TypeError:
            raise self._error(field_name, f"has type {type(value).__name__}", "Pass an int.") from None

    def _count(self, field_name: str) -> int | None:
        """A positive int or None; also None if the config class lacks the field."""
        if getattr(self._config, field_name, None) is None:
            return None
        count = self._int(field_name)
        if count < 1:
            raise self._error(field_name, "is not positive", "Pass an int >= 1, or None for the default.")
        return count

    def _check_name(self) -> None:
        name = self._config.name
        remedy = "Pass a non-empty str without '.'; it becomes part of parameter names."
        if not isinstance(name, str):
            raise self._error("name", f"has type {type(name).__name__}", remedy)
        if not name:
            raise self._error("name", "is empty", remedy)
        if "." in name:
            raise self._error("name", "contains '.'", remedy)
        if hasattr(nn.ModuleDict(), name):
            raise self._error("name", "is an attribute of torch.nn.ModuleDict, which holds the tables", "Rename it.")

    def _num_embeddings(self) -> int:
        dim = self._int("embedding_dim")
        if not 1 <= dim <= MAX_EMBEDDING_DIM:
            raise self._error("embedding_dim", "is out of range", f"Accepted: 1 to {MAX_EMBEDDING_DIM:,}.")
        num_embeddings = self._int("num_embeddings")
        if num_embeddings < 1:
            raise self._error("num_embeddings", "is not positive", "Pass an int >= 1; it may be nominal.")
        most = (NOMINAL_BYTES_LIMIT - 1) // (4 * dim)
        if num_embeddings > most:
            raise self._error(
                "num_embeddings",
                f"x embedding_dim={dim} floats are {4 * dim * num_embeddings:,} bytes, torch's shapes end below 2**63",
                f"num_embeddings is nominal: ids are never bounded by it. Pass {most:,} or less, and the number of "
                "rows that you expect to live as planned_rows.",
            )
        return num_embeddings

    def _features(self) -> tuple[str, ...]:
        names = self._config.feature_names
        if not isinstance(names, (list, tuple)):
            raise self._error("feature_names", f"has type {type(names).__name__}", "Pass a list of str.")
        for name in names:
            if not isinstance(name, str) or not name:
                raise self._error("feature_names", f"has the entry {name!r}", "Every entry is a non-empty str.")
        if len(set(names)) != len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise self._error("feature_names", f"names {repeated!r} twice", "Name each feature once a table.")
        return tuple(names) or (self._config.name,)  # TorchRec's default

    def _check_kind(self) -> None:
        config = self._config
        if config.data_type not in _ROW_TYPES:
            raise self._error("data_type", "is not available for hashed tables", "Use DataType.FP32, BF16 or FP16.")
        if not isinstance(config, EmbeddingConfig) and _pooling(config) not in (PoolingType.SUM, PoolingType.MEAN):
            raise self._error("pooling", "is not available", "Use PoolingType.SUM or PoolingType.MEAN.")
        for field_name, neutral in _UNSUPPORTED_FIELDS.items():
            value = getattr(config, field_name, neutral)  # TorchRec 1.5 lacks some
            if value is not neutral and value != neutral:
                raise self._error(
                    field_name, "is not honoured by hashed tables", f"Leave it at its default, {neutral!r}."
                )

    def _capacity(self) -> tuple[int | None, FullPolicy]:
        max_rows = self._count("max_rows")
        policy = getattr(self._config, "full_policy", FullPolicy.GROW)
        try:
            full_policy = FullPolicy(policy)
        except ValueError:
            allowed = ", ".join(repr(p.value) for p in FullPolicy)
            raise self._error("full_policy", "is unknown", f"Accepted: {allowed}.") from None
        if full_policy is FullPolicy.GROW and max_rows is not None:
            raise self._error(
                "max_rows",
                "has no effect with full_policy='grow'",
                "Pass full_policy='evict' or 'error', or no max_rows.",
            )
        if full_policy is not FullPolicy.GROW and max_rows is None:
            raise ConfigError(
                f"{self._where}: full_policy={full_policy.value!r} without max_rows never takes effect. Pass max_rows, "
                "the most rows that may live over all ranks, or full_policy='grow'."
            )
        return max_rows, full_policy

    def _seed(self) -> int:
        if not hasattr(self._config, "seed"):
            return 0
        seed = self._int("seed")
        if not -(2**63) <= seed < 2**63:
            raise self._error("seed", "does not fit in int64", "Accepted: -2**63 to 2**63 - 1.")
        return seed

    def _initializer_source(self) -> str:
        """Which field initial rows come from; ``""`` for the default."""
        config = self._config
        given = []
        initializer = getattr(config, "initializer", None)
        if initializer is not None:
            if not isinstance(initializer, (Uniform, Normal, Constant)):
                problem = f"has type {type(initializer).__name__}"
                raise self._error("initializer", problem, "Accepted: Uniform, Normal, Constant, None.")
            given.append("initializer")
        if config.weight_init_min is not None or config.weight_init_max is not None:
            self._init_range()
            given.append("weight_init_min and weight_init_max")
        if config.init_fn is not None and not self._is_default_init_fn():
            if not callable(config.init_fn):
                raise self._error("init_fn", "is not callable", "Pass a function of a tensor, or None.")
            given.append("init_fn")
        if len(given) > 1:
            raise ConfigError(
                f"{self._where}: {' and '.join(given)} are both given, and each alone decides the initial rows. "
                f"Give one of them: {', or '.join(given)}."
            )
        return given[0] if given else ""

    def _init_range(self) -> Uniform:
        low, high = self._config.weight_init_min, self._config.weight_init_max
        if low is None or high is None:
            has, lacks = ("max", "min") if low is None else ("min", "max")
            remedy = f"Give weight_init_{lacks} too: num_embeddings is nominal, so nothing follows from it."
            raise self._error(f"weight_init_{has}", f"is given without weight_init_{lacks}", remedy)
        try:
            return Uniform(low, high)
        except ConfigError as e:
            raise ConfigError(
                f"{self._where}: weight_init_min={low!r}, weight_init_max={high!r} are no range: {e}"
            ) from e

    def _is_default_init_fn(self) -> bool:
        """Whether ``init_fn`` is what ``__post_init__`` fills in, and not a user's."""
        init_fn = self._config.init_fn
        if isinstance(self._config, _HashFields):
            return isinstance(init_fn, _DefaultInitFn)
        default_range = {"a": self._config.get_weight_init_min(), "b": self._config.get_weight_init_max()}
        return _uniform_range(init_fn) == default_range

    def _initializer(self, dim: int) -> Initializer:
        source = self._initializer_source()
        if source == "initializer":
            return cast(Initializer, self._config.initializer)
        if source == "init_fn":
            # A partial of torch's uniform_ is the very distribution that we can draw for every id.
            uniform_range = _uniform_range(self._config.init_fn)
            if uniform_range is not None:
                return Uniform(uniform_range["a"], uniform_range["b"])
            return bank_from_init_fn(self._config.init_fn, dim, self._seed())
        return self._init_range() if source else DEFAULT_INITIALIZER

    def _check_largest(self, initializer: Initializer) -> Initializer:
        """Refuse initial rows that would be infinite in the table's type."""
        dtype = _ROW_TYPES[self._config.data_type].dtype
        largest = initializer.largest
        if largest > torch.finfo(dtype).max:
            raise self._error(
                "data_type",
                f"holds values up to {torch.finfo(dtype).max:.6g}, initial rows reach {largest:.6g}",
                "Use DataType.FP32, or an initializer with smaller values.",
            )
        return initializer


def _pooling(config: BaseEmbeddingConfig) -> PoolingType:
    """What a table does with the rows of a bag: nothing, if it is one of sequences."""
    return PoolingType.NONE if isinstance(config, EmbeddingConfig) else config.pooling


def _uniform_range(init_fn: Callable[..., Any] | None) -> dict[str, float] | None:
    """``{"a": low, "b": high}`` if the function is ``partial(torch.nn.init.uniform_, a=low, b=high)``, else None."""
    if not isinstance(init_fn, functools.partial) or init_fn.func is not torch.nn.init.uniform_ or init_fn.args:
        return None
    return dict(init_fn.keywords) if set(init_fn.keywords) == {"a", "b"} else None


def _check_unique(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"tables: {what} {repeated!r} is used {names.count(repeated)} times. Make every {what} unique."
        )
