"""`ShardedHashCollection`: what the sharded hashed collections share, whatever they make of the rows.

Between ids and rows everything is the same: DIST and its check, MAP and the ranks' verdict, SWAP, the lookup, undo.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from hybridrec._compat.torchrec import (
    EmbeddingShardingContext,
    EmptyFusedOptimizer,
    FusedOptimizerModule,
    KJTList,
    KJTListSplitsAwaitable,
    ShardedEmbeddingModule,
)
from hybridrec.config import TableConfig
from hybridrec.distributed.batch_contents import check_without_samples
from hybridrec.distributed.exchange_check import CheckedSplits
from hybridrec.distributed.from_plan import shard_from_plan
from hybridrec.distributed.fused_optimizer import HashCollectionOptimizer, HashFusedOptimizer
from hybridrec.distributed.host_thread import settle_host_thread
from hybridrec.distributed.input_dist import FeatureOrder
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.mapped_batch import MappedBatch
from hybridrec.distributed.routing import Routing, TablePart
from hybridrec.distributed.rows_state_dict import put_rows, take_rows, unexpected_keys
from hybridrec.distributed.slot_parameter import slot_parameter
from hybridrec.distributed.verdict import MODES, Withdrawn, agree
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError, StateError
from hybridrec.metrics import TableStats, sum_stats
from hybridrec.store.row_export import RowChunk, RowExport


@dataclass
class HashBatchContext(Multistreamable):
    """What one batch carries from its input dist to its output dist."""

    is_training: bool = True
    """Whether the batch trains: the mode in force when the context was made."""
    sharding_contexts: list[Any] = field(default_factory=list)
    """One of TorchRec's; its input dist writes ``batch_size_per_rank`` there."""
    error: Exception | None = None
    """What this rank has against the batch; becomes every rank's error when the batch is mapped."""
    has_ended: bool = False
    """Whether this rank ran out of batches, and gives an empty one."""
    mapped: MappedBatch | None = None
    is_uploaded: bool = False
    """Whether what the output needs besides is where the output is."""

    def record_stream(self, stream: torch.Stream) -> None:
        """The lookup does that for what it uploaded."""


class ShardedHashCollection(
    ShardedEmbeddingModule[KJTList, list[Tensor], Any, HashBatchContext],
    FusedOptimizerModule,
):
    """Hashed tables over all ranks: ids travel over the host group, what is looked up over the device group.

    In training mode with grad enabled a forward trains (docs/design/transaction.md); else it reads and leaves no
    trace. A batch that any rank refuses is undone on all, and all raise the same error. One caller at a time: forwards
    from several threads are not ordered between ranks.
    """

    TABLES_NAME: str
    """Of the child that holds the tables' parameters, as TorchRec calls it."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        lookup: PooledLookup,
        routing: Routing,
        *,
        is_weighted: bool,
        device_group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """
        Args:
            tables: Resolved, in the order of the collection.
            lookup: This rank's shards.
            routing: Who looks up what, in the order in which features are fed.
            is_weighted: Whether ids carry weights to the lookup.
            device_group: What is looked up travels over it.
            host_group: Ids and verdicts travel over it (gloo).
            device: Where the output is.
        """
        super().__init__(qcomm_codecs_registry=None)
        self._table_configs = tuple(tables)
        self._is_weighted = is_weighted
        self._device = device
        self._host_group, self._device_group = host_group, device_group
        self._routing = routing
        self._feature_order = FeatureOrder(routing.feature_names, is_weighted=is_weighted)
        self._lookups = [lookup]
        self._create_parameters(lookup)

    @classmethod
    def from_plan(
        cls,
        module: nn.Module,
        sharder: ModuleSharder[Any],
        device: str | torch.device,
        plan: ShardingPlan | EmbeddingModuleShardingPlan | None = None,
        *,
        env: ShardingEnv | None = None,
    ) -> Self:
        """Shard a collection by itself, without `DistributedModelParallel`. Collective.

        Args:
            module: The collection, with its optimizer.
            sharder: Of its class.
            device: Where it computes.
            plan: Of ``module`` alone, or its entry for one collection. None: TorchRec's planner decides.
            env: Whose group carries what is looked up; None: the default process group's.

        Raises:
            ConfigError: The sharder is for another class, or the plan has no entry for the module.
        """
        return cast(Self, shard_from_plan(module, sharder, device, plan, env))

    # ---- what a kind of collection does its own way --------------------------------------------------------------

    def _check_batch(self, features: KeyedJaggedTensor, ctx: HashBatchContext) -> None:
        """Refuse a batch that cannot be looked up exactly."""
        raise NotImplementedError

    def _look_at(self, ctx: HashBatchContext, features: KeyedJaggedTensor) -> None:
        """Note what the output needs of the batch as the user passed it."""

    def _send_ids(self, ctx: HashBatchContext, features: KeyedJaggedTensor) -> list[Awaitable[Awaitable[Any]]]:
        """Begin to send the ids, features in the order of the lookup; collective over the host group."""
        raise NotImplementedError

    def _received(self, ctx: HashBatchContext, dist_input: Any) -> KeyedJaggedTensor:
        """The keys that this rank owns, out of what `_send_ids` of all ranks gave."""
        keys: KeyedJaggedTensor = dist_input[0]
        return keys

    def _upload(self, ctx: HashBatchContext) -> None:
        """Send to the device what the output needs besides the rows."""

    # ---- TorchRec's stages ---------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """All of TorchRec's stages. Raises `BackendError` if a rank is gone."""
        with watched(self._host_group, "forward"):
            return super().forward(*args, **kwargs)

    def create_context(self) -> HashBatchContext:
        return HashBatchContext(is_training=self._trains())

    def input_dist(self, ctx: HashBatchContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:
        """DIST. A batch that this rank cannot use is replaced by an empty one, so that nobody waits in vain.

        With an error in the context ``features`` is not looked at.
        """
        settle_host_thread(self._host_group)
        if ctx.error is not None:
            return self._send(ctx, self._feature_order.empty())
        try:
            self._check_batch(features, ctx)
            with torch.no_grad():
                if ctx.has_ended:
                    check_without_samples(features)
                self._look_at(ctx, features)
                features = self._feature_order.apply(features)
        except Exception as e:  # travels to the other ranks, then every rank raises it
            if self._host_group.size() == 1:
                raise
            ctx.error = e
            features = self._feature_order.empty()
        return self._send(ctx, features)

    def _send(self, ctx: HashBatchContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:
        ctx.sharding_contexts.append(EmbeddingShardingContext(batch_size_per_feature_pre_a2a=features.stride_per_key()))
        with torch.no_grad():
            splits = KJTListSplitsAwaitable(self._send_ids(ctx, features), ctx)
        return CheckedSplits(splits, ctx, self._host_group.rank())

    def map_batch(self, ctx: HashBatchContext, dist_input: Any, may_wait: Callable[[], bool] | None = None) -> bool:
        """MAP and the ranks' verdict. Collective over the host group. Idempotent for a context.

        Args:
            ctx: Of the batch.
            dist_input: What `input_dist` gave, waited for.
            may_wait: Whether to wait for pins; see `PooledLookup.map`. Raises `Withdrawn` to take the batch back.

        Returns:
            Whether the batch is mapped; False if a rank took it back. It can be mapped again.

        Raises:
            HybridRecError: A rank refused; the batch is undone on all ranks.
        """
        if ctx.mapped is not None:
            return True
        settle_host_thread(self._host_group)
        mapped: MappedBatch | None = None
        error = ctx.error
        lookup = self._lookups[0]
        if error is None:
            try:
                result = lookup.map(self._received(ctx, dist_input), is_training=ctx.is_training, may_wait=may_wait)
                if isinstance(result, MappedBatch):
                    mapped = result
                else:
                    error = result
            except Exception as e:  # travels to the other ranks, then is raised below
                error = e
        agreed = agree(error, self._host_group, mode=self._mode(ctx), has_ended=ctx.has_ended)
        if agreed is not None:
            if mapped is not None and mapped.transaction is not None:
                mapped.transaction.undo()
            if isinstance(agreed, Withdrawn):
                return False
            raise agreed from (None if agreed is error else error)
        ctx.mapped = mapped
        return True

    def swap_batch(self, ctx: HashBatchContext) -> None:
        """SWAP of a mapped batch: rows move to their slots, what the kernels need to where these are. Idempotent."""
        assert ctx.mapped is not None
        if not ctx.is_uploaded:
            self._upload(ctx)
            ctx.is_uploaded = True
        self._lookups[0].swap(ctx.mapped)

    def unmap_batch(self, ctx: HashBatchContext) -> None:
        """Take a mapped batch back whose lookup did not begin. Newest first; it can be mapped again. Not collective."""
        self.release_batch(ctx)
        ctx.mapped = None

    def release_batch(self, ctx: HashBatchContext) -> None:
        """The batch is over: what was not trained by a backward is undone."""
        if ctx.mapped is None or ctx.mapped.waits_for_step:
            return
        self._lookups[0].end_frozen_read(ctx.mapped)
        transaction = ctx.mapped.transaction
        if transaction is not None and not transaction.is_final:
            transaction.undo()

    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    @property
    def frozen_tables(self) -> tuple[bool, ...]:
        """[T], in the order of the collection: which tables do not train, as their parameters' ``requires_grad`` says.

        The same on all ranks, whether they hold rows of a table or not: what follows from a change is collective.
        """
        return tuple(not all(p.requires_grad for p in of_table) for of_table in self._parameters_of_table)

    def _mode(self, ctx: HashBatchContext) -> int:
        """What the ranks compare: 0 reads, else it trains, and says which of the tables."""
        if not ctx.is_training:
            return 0
        return 1 + zlib.crc32(bytes(self.frozen_tables)) % (MODES - 1)

    def compute(self, ctx: HashBatchContext, dist_input: Any) -> list[Tensor]:
        """MAP and SWAP unless they happened, then COMPUTE: what the lookup gives for all ranks' batches."""
        self.map_batch(ctx, dist_input)
        self.swap_batch(ctx)
        return [self._lookups[0](ctx.mapped)]

    @property
    def table_configs(self) -> tuple[TableConfig, ...]:
        """The tables, resolved, in the order of the collection."""
        return self._table_configs

    @property
    def host_group(self) -> dist.ProcessGroup:
        """Ids and verdicts travel over it."""
        return self._host_group

    @property
    def device_group(self) -> dist.ProcessGroup:
        """What is looked up travels over it."""
        return self._device_group

    @property
    def lookup(self) -> PooledLookup:
        """This rank's shards."""
        return self._lookups[0]

    @property
    def routing(self) -> Routing:
        """Which rank looks up what."""
        return self._routing

    @property
    def parts(self) -> tuple[TablePart, ...]:
        """[T], what this rank holds: one for each of the tables of `lookup`."""
        return self._routing.of_rank(self._host_group.rank())

    @property
    def copied_bytes(self) -> int:
        """Bytes of KJTs that came on another device and were copied to the host."""
        return self._feature_order.copied_bytes

    # ---- what users call -----------------------------------------------------------------------------------------

    def stats(self) -> tuple[TableStats, ...]:
        """Counters of this rank, one value a table, in the order of the tables. Not collective.

        A table of which the rank holds nothing has zeros; of several column shards on the rank it is the sum.
        """
        by_table: dict[str, list[TableStats]] = {config.name: [] for config in self._table_configs}
        for part, stats in zip(self.parts, self._lookups[0].stats(), strict=True):
            by_table[part.table.name].append(stats)
        rank = self._host_group.rank()
        return tuple(sum_stats(stats, table=name, rank=rank) for name, stats in by_table.items())

    def export_rows(self, table: str, *, chunk_rows: int | None = None) -> RowExport:
        """This rank's rows of a table as of the last committed batch, ascending by id, in chunks of host memory.

        Batches that a pipeline prepares are taken back first, and rows that are newer on the device are written to the
        host. Collective.

        Args:
            table: Its name; of a column-wise table with the columns, as in ``"t[0:32]"``.
            chunk_rows: Most rows of a chunk; None: chunks of 256 KiB.

        Returns:
            Nothing but an empty export on a rank that holds none of the table.

        Raises:
            ConfigError: There is no such table; the same on all ranks.
        """
        names = [part.name for part in self._routing.parts]
        if table not in names:
            raise ConfigError(f"export_rows: there is no table {table!r}. Tables: {names}.")
        self.take_back_prepared()
        if table not in self._lookups[0].table_names:
            return RowExport(0, 1 if chunk_rows is None else chunk_rows, _no_rows, lambda: None)
        return self._lookups[0].export_rows(table, chunk_rows=chunk_rows)

    def owner_of_table(self, table: str) -> int | None:
        """The rank that has all rows of a table of the lookup; None: each has those of the ids that hash to it."""
        return self._routing.owners[table]

    def take_back_prepared(self) -> None:
        """Take back what a pipeline prepared ahead: the shards are as the committed batches left them. Collective."""
        owner = getattr(self.__dict__.get("forward"), "owner", None)  # of a `PipelinedCall`
        pipeline = None if owner is None else owner()
        if pipeline is not None:
            pipeline.withdraw()
        settle_host_thread(self._host_group)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Of all tables; its ``param_groups`` carry the learning rates."""
        return self._optimizer

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """All parameters are sharded: data parallelism leaves them alone."""
        for name, _ in self.named_parameters(prefix):
            yield name

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedHashCollection:
        """Refuse what would move or convert the slots: `half()`, `to(other device)`, `share_memory()`.

        Raises:
            ConfigError: ``fn`` does not leave a tensor as it is. Nothing changed.
        """
        for parameter in self.parameters():
            probe = torch.zeros_like(parameter[:1].detach())
            address = probe.data_ptr()
            moved = fn(probe)
            if moved.data_ptr() != address or moved.dtype != probe.dtype or moved.device != probe.device:
                raise ConfigError(
                    f"{type(self).__name__}: the rows of hashed tables cannot be moved or converted once they are "
                    f"sharded (they would go from {probe.dtype} on {probe.device} to {moved.dtype} on {moved.device}). "
                    "Convert the dense part of the model, and choose device and dtype before sharding."
                )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """This rank's rows; see `rows_state_dict`. Collective, since what a pipeline prepared is taken back."""
        self.take_back_prepared()
        rank, size = self._host_group.rank(), self._host_group.size()
        put_rows(self._lookups[0], destination, prefix, rank, size, self.parts)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        """Replace all rows. Raises `ConfigError` if they are not those of this model."""
        self.take_back_prepared()
        rank, size = self._host_group.rank(), self._host_group.size()
        take_rows(self._lookups[0], state_dict, prefix, rank, size, self.parts)
        _, unexpected, _ = lists
        unexpected += unexpected_keys(state_dict, prefix, {config.name for config in self._table_configs})

    def _create_parameters(self, lookup: PooledLookup) -> None:
        """``{TABLES_NAME}.{table}.weight`` (views of the slots) and the fused optimizer over them.

        Of a table that is on other ranks alone it has no rows: ranks that freeze or clip it do so alike.
        """
        slots = nn.ModuleDict({c.name: _Slots(f"{self.TABLES_NAME}.{c.name}.") for c in self._table_configs})
        self.add_module(self.TABLES_NAME, slots)
        names: list[str] = []
        for part, parameter in zip(self.parts, lookup.slot_parameters, strict=True):
            holder = slots[part.table.name]
            # Column shards that share a rank: all but the first have their column in the name.
            weight = f"weight_{part.first_column}" if hasattr(holder, "weight") else "weight"
            holder.register_parameter(weight, parameter)
            names.append(f"{self.TABLES_NAME}.{part.table.name}.{weight}")
        for config in self._table_configs:
            if not hasattr(slots[config.name], "weight"):
                no_rows = torch.empty((0, config.embedding_dim), dtype=config.row_type.dtype, device=self._device)
                slots[config.name].register_parameter("weight", slot_parameter(no_rows, config.name))
        # Read for every batch: walking modules takes 5 us a table.
        self._parameters_of_table = [list(slots[config.name].parameters()) for config in self._table_configs]
        for every in slots.parameters():
            # The mark by which TorchRec's filters tell that a parameter is updated in the backward.
            every._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]  # TorchRec's own
        optimizers = []
        for k, kernel in enumerate(lookup.kernels):
            params = {names[t]: lookup.slot_parameters[t] for t in lookup.table_kernels.tables_of_kernel[k]}
            optimizers.append(HashFusedOptimizer(kernel, params))
        self._optimizer = HashCollectionOptimizer(optimizers, lookup.gradients)


class _Slots(nn.Module):
    """Holds the parameter that is one table's slots, which are not the table: the collection saves its rows."""

    def __init__(self, path: str) -> None:
        """``path``: in its collection, with a point at the end."""
        super().__init__()
        self._path = path

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._require_collection("state_dict()", prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._require_collection("load_state_dict()", prefix)

    def _require_collection(self, call: str, prefix: str) -> None:
        if not prefix.endswith(self._path):
            raise StateError(
                f"{call} of {self._path!r}: by itself it is no checkpoint, the rows are in the state_dict of its "
                "collection. Call it for the model, or for the collection."
            )


def _no_rows(num_rows: int) -> RowChunk:
    raise AssertionError(f"an empty export was asked for {num_rows} rows")
