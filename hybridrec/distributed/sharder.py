"""The sharders: what `EmbeddingShardingPlanner` and `DistributedModelParallel` ask about our collections."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from hybridrec._compat.planner import PLANNING_ATTRIBUTE, TIERS_ATTRIBUTE, install_planner_wraps
from hybridrec._compat.torchrec import BaseEmbeddingSharder, EmbeddingComputeKernel
from hybridrec.backend import parse_device, resolve_backend
from hybridrec.config import TableConfig
from hybridrec.distributed.device_check import check_collectives
from hybridrec.distributed.host_env import check_host_env, own_host_group
from hybridrec.distributed.host_memory import HostBudget, local_world_size
from hybridrec.distributed.kernel_agreement import agree_on_kernels
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.output_dtype import output_dtype_of
from hybridrec.distributed.placement import Placement, place
from hybridrec.distributed.planner_demand import TableDemand
from hybridrec.distributed.planner_report import HybridPlanPolicy, SharderPlanning
from hybridrec.distributed.routing import SHARDING_TYPES, Routing, TablePart, check_columns, parts_of
from hybridrec.distributed.shard_table import ShardTable
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.distributed.sharded_embedding_bag import ShardedHashEmbeddingBagCollection
from hybridrec.distributed.verdict import agree
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import BackendError, ConfigError
from hybridrec.kernels.factory import KernelChoice, group_tables, kernel_choice
from hybridrec.kernels.optimizer import OptimizerSpec, refuse_stochastic_rounding
from hybridrec.modules.hash_collection import HashCollection
from hybridrec.modules.hash_embedding_bag import HashEmbeddingBagCollection
from hybridrec.native import table_seed
from hybridrec.native.protocol import ShardSpec
from hybridrec.store.row_state_layout import RowStateLayout

logger = logging.getLogger("hybridrec")
install_planner_wraps(HybridPlanPolicy())  # at import, so that a Topology may be made before the sharders are


@dataclass(frozen=True, kw_only=True)
class _PlannedPart:
    """A part of a table, and all that was decided about it."""

    part: TablePart
    plan: ParameterSharding
    optimizer: OptimizerSpec
    kernel: KernelChoice
    is_frozen: bool


class HashCollectionSharder(BaseEmbeddingSharder[HashCollection]):
    """Shards a hashed collection over all ranks: row-wise, or tables or columns of tables on single ranks."""

    _lookup_class = PooledLookup

    def __init__(
        self,
        host_env: ShardingEnv | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        *,
        sharding_type: str | ShardingType | None = None,
        kernel_type: str | EmbeddingComputeKernel | None = None,
        host_memory_bytes: int | None = None,
    ) -> None:
        """
        Args:
            host_env: Environment whose process group is a gloo group of all ranks. None: that of the default process
                group, which must be gloo. A group that is the model's too is used for planning alone: `shard` makes
                another one of its ranks, over which ids travel.
            fused_params: TorchRec's, for tables without `apply_optimizer_in_backward`: ``optimizer`` (an
                ``EmbOptimType``), ``learning_rate``, ``eps`` .. And for all tables ``output_dtype``, FP32 (the
                default), BF16 or FP16: sums are float32, what the collection returns is rounded to it.
            qcomm_codecs_registry: Must be empty: quantised pools are not exact.
            sharding_type: The one that plans may choose; None: all.
            kernel_type: The compute kernel that plans may choose; None: all.
            host_memory_bytes: Host memory that the shards of all collections on one rank may take together; None:
                80 % of what is available.

        Raises:
            ConfigError: An argument cannot be honoured.
        """
        if qcomm_codecs_registry:
            raise ConfigError(
                f"qcomm_codecs_registry={dict(qcomm_codecs_registry)!r}: quantised communication is not available for "
                "hashed tables, whose results are exact. Pass None."
            )
        super().__init__(fused_params=dict(fused_params) if fused_params else None)
        self._host_group = check_host_env(host_env)
        self._sharding_type = _choice("sharding_type", sharding_type, SHARDING_TYPES)
        self._kernel_type = _choice("kernel_type", kernel_type, [placement.value for placement in Placement])
        self._host_budget = HostBudget(host_memory_bytes)
        self._output_dtype = output_dtype_of(self.fused_params or {})
        setattr(self, PLANNING_ATTRIBUTE, SharderPlanning(host_group=self._host_group, budget=self._host_budget))

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Row-wise, table-wise and column-wise, on every device; a plan without a constraint takes row-wise."""
        return [self._sharding_type] if self._sharding_type else list(SHARDING_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The three placements, the same on every device."""
        return [self._kernel_type] if self._kernel_type else [placement.value for placement in Placement]

    def shardable_parameters(self, module: HashCollection) -> dict[str, nn.Parameter]:
        """Table -> nominal parameter, which tells the planner what the table takes in each tier."""
        parameters = {}
        for table in module.table_configs:
            parameter = _nominal_parameter(module, table)
            layout = RowStateLayout(
                table.embedding_dim, self._optimizer_of(table, parameter).row_states(), table.row_type
            )
            setattr(parameter, TIERS_ATTRIBUTE, TableDemand(table=table, layout=layout))
            parameters[table.name] = parameter
        return parameters

    def shard(
        self,
        module: HashCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedHashCollection:
        """Build this rank's shards. No row exists yet and, on the host, no memory for any is taken.

        Collective over the host group: what one rank refuses, all refuse, and a kernel that one rank lacks serves on
        none. On a device that is not the host the first call tests copies, FBGEMM's kernels and, over the device group,
        collectives with known values.

        Raises:
            ConfigError: The plan lacks a table or asks for what does not exist; a table has no optimizer; the groups
                do not match.
            BackendError: The slots do not fit the device; or the device or its collectives failed their self-test.
        """
        host_group = own_host_group(self._host_group, env.process_group)
        with _raising_together(host_group):
            device = parse_device(device) or module.target_device
            planned = self._planned_parts(module, params, env, device, module_fqn, host_group)
        choices = agree_on_kernels([p.part for p in planned], [p.kernel for p in planned], host_group)
        planned = [replace(p, kernel=choice) for p, choice in zip(planned, choices, strict=True)]
        with _raising_together(host_group):
            sharded = self._shard(module, planned, env, device, host_group)
        self._check_collectives(sharded, host_group)
        return sharded

    def _sharded(self, *args: Any, **kwargs: Any) -> ShardedHashCollection:
        """The sharded collection."""
        raise NotImplementedError

    def _check_collectives(self, sharded: ShardedHashCollection, host_group: dist.ProcessGroup) -> None:
        lookup = sharded.lookup
        if not resolve_backend(lookup.device.type).is_host_memory:
            with watched(host_group, "self-test of the device's collectives"):
                check_collectives(
                    sharded.device_group,
                    lookup.device,
                    total_dim=sharded.routing.largest_dim,
                    host_group=host_group,
                )

    def _planned_parts(
        self,
        module: HashCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
        module_fqn: str | None,
        host_group: dist.ProcessGroup,
    ) -> list[_PlannedPart]:
        """All parts of all tables, on all ranks, with the kernels that this rank would choose for them."""
        if env.process_group is None:
            raise ConfigError(f"{module_fqn or type(module).__name__}: env has no process group to send pools over.")
        if env.world_size != host_group.size() or env.rank != host_group.rank():
            raise ConfigError(
                f"host_env is rank {host_group.rank()} of {host_group.size()}, the model's environment is "
                f"rank {env.rank} of {env.world_size}. The host group must have the same ranks in the same order."
            )
        tables = module.table_configs
        trained = {name: rows for name, rows in module.num_rows().items() if rows}
        if trained:
            raise ConfigError(
                f"{module_fqn or type(module).__name__}: it was trained unsharded and holds rows ({trained}), which "
                "sharding would lose. Shard it before the first training batch."
            )
        missing = [table.name for table in tables if table.name not in params]
        if missing:
            raise ConfigError(
                f"{module_fqn or type(module).__name__}: the plan has no entry for table {missing[0]!r} "
                f"({len(missing)} of {len(tables)} tables are missing). Plan the whole collection, or shard none of it."
            )
        resolve_backend(device.type).self_test(device)
        planned = []
        for table in tables:
            optimizer = self._checked_optimizer(module, table, params[table.name])
            for part in parts_of(table, params[table.name], env.world_size):
                check_columns(part, optimizer)
                kernel = kernel_choice(
                    optimizer,
                    dim=part.dim,
                    is_weighted=module.is_weighted(),
                    device=device,
                    row_type=table.row_type,
                )
                planned.append(
                    _PlannedPart(
                        part=part,
                        plan=params[table.name],
                        optimizer=optimizer,
                        kernel=kernel,
                        is_frozen=not _nominal_parameter(module, table).requires_grad,
                    )
                )
        return planned

    def _shard(
        self,
        module: HashCollection,
        planned: Sequence[_PlannedPart],
        env: ShardingEnv,
        device: torch.device,
        host_group: dist.ProcessGroup,
    ) -> ShardedHashCollection:
        groups = _grouped(planned, is_pooled=self._lookup_class.is_pooled)
        routing = Routing(parts=tuple(p.part for group in groups for p in group), world_size=env.world_size)
        kernels = [[_shard_table(p, env) for p in group] for group in groups if group[0].part.owner in (None, env.rank)]
        self._check_device_memory([table for group in kernels for table in group], device)
        lookup = self._lookup_class(
            kernels,
            is_weighted=module.is_weighted(),
            device=device,
            backend=resolve_backend(device.type),
            rank=env.rank,
            world_size=env.world_size,
            host_budget_bytes=self._host_budget.part_of(module),
        )
        sharded = self._sharded(
            module,
            module.table_configs,
            lookup,
            routing,
            device_group=env.process_group,
            host_group=host_group,
            device=device,
            output_dtype=self._output_dtype,
        )
        for p in planned:
            sharded.get_submodule(f"{sharded.TABLES_NAME}.{p.part.table.name}").requires_grad_(not p.is_frozen)
        return sharded

    def _checked_optimizer(
        self, module: HashCollection, table: TableConfig, planned: ParameterSharding
    ) -> OptimizerSpec:
        parameter = _nominal_parameter(module, table)
        optimizer = self._optimizer_of(table, parameter)
        if optimizer.kind == "none" and parameter.requires_grad:
            raise ConfigError(
                f"table {table.name!r} has no optimizer: its rows would never learn. Call "
                "apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {'lr': ...}) before "
                "sharding, or give the sharder fused_params={'optimizer': EmbOptimType.EXACT_ADAGRAD, ...}."
            )
        if planned.compute_kernel == Placement.DEVICE.value and table.device_rows is not None:
            logger.warning(
                "table %r: device_rows=%s has no effect, since the plan's kernel is 'fused': all planned rows are on "
                "the device. Choose 'fused_uvm_caching' in ParameterConstraints(compute_kernels=[...]) to bound them.",
                table.name,
                f"{table.device_rows:,}",
            )
        return optimizer

    def _optimizer_of(self, table: TableConfig, parameter: nn.Parameter) -> OptimizerSpec:
        """From `apply_optimizer_in_backward` if it was called for the table, else from ``fused_params``."""
        fused_params = dict(self.fused_params or {})
        fused_params.pop("output_dtype", None)  # of no optimizer
        for arguments in (fused_params, *getattr(parameter, "_optimizer_kwargs", [])):
            refuse_stochastic_rounding(arguments, table.row_type, table=table.name)
        return OptimizerSpec.of_parameter(parameter, fused_params, table=table.name)

    def _check_device_memory(self, tables: list[ShardTable], device: torch.device) -> None:
        needed = sum(t.placed.num_slots * t.layout.slot_bytes for t in tables)
        backend = resolve_backend(device.type)
        _, total = backend.memory_bytes(device)
        if backend.is_host_memory:
            total //= local_world_size()  # ranks of a machine share it
        if needed > total:
            largest = max(tables, key=lambda t: t.placed.num_slots * t.layout.slot_bytes)
            raise BackendError(
                f"the slots of {len(tables)} tables take {needed:,} bytes on {device}, which has {total:,} for a rank. "
                f"The largest is {largest.name!r}: {largest.placed.num_slots:,} slots, kernel "
                f"{largest.placed.placement.value!r}. "
                "Give planned_rows or device_rows, or choose 'fused_uvm_caching' in ParameterConstraints."
            )


class HybridHashEmbeddingBagCollectionSharder(HashCollectionSharder):
    """Shards `HashEmbeddingBagCollection` over all ranks: row-wise, or tables or columns of tables on single ranks."""

    @property
    def module_type(self) -> type[HashCollection]:
        return HashEmbeddingBagCollection

    def _sharded(self, *args: Any, **kwargs: Any) -> ShardedHashCollection:
        return ShardedHashEmbeddingBagCollection(*args, **kwargs)


def _shard_table(planned: _PlannedPart, env: ShardingEnv) -> ShardTable:
    """A part that this rank holds rows of."""
    part, optimizer = planned.part, planned.optimizer
    table, cache = part.table, planned.plan.cache_params
    layout = RowStateLayout(part.dim, optimizer.row_states(), table.row_type)
    num_ranks = env.world_size if part.owner is None else 1
    placed = place(table, planned.plan.compute_kernel, None if cache is None else cache.load_factor, num_ranks)
    spec = ShardSpec(
        name=part.name,
        dim=part.dim,
        first_column=part.first_column,
        num_row_states=len(layout.row_states),
        num_row_wise_states=len(layout.row_wise_states),
        state_initial_values=layout.initial_values,
        num_slots=placed.num_slots,
        planned_rows=placed.planned_rows,
        max_rows=placed.max_rows,
        row_type=table.row_type,
        full_policy=table.full_policy.value,
        table_seed=table_seed(table.seed, table.name),
        **_initial_fields(part),
    )
    return ShardTable(
        name=part.name,
        spec=spec,
        placed=placed,
        layout=layout,
        optimizer=optimizer,
        is_owned=part.owner is not None,
        num_features=part.num_features,
        kernel=planned.kernel.name,
    )


def _grouped(planned: Sequence[_PlannedPart], *, is_pooled: bool) -> list[list[_PlannedPart]]:
    """The parts of all kernels of all ranks, in the order of `Routing`: row-wise ones apart from owned ones."""
    by_owner: dict[int, list[_PlannedPart]] = {}
    for one in planned:
        by_owner.setdefault(-1 if one.part.owner is None else one.part.owner, []).append(one)
    return [
        group
        for _, parts in sorted(by_owner.items())
        for group in group_tables(
            parts,
            dim=lambda p: p.part.dim,
            optimizer=lambda p: p.optimizer,
            name=lambda p: p.kernel.name,
            row_type=lambda p: p.part.table.row_type,
            is_pooled=is_pooled,
        )
    ]


@contextlib.contextmanager
def _raising_together(host_group: dist.ProcessGroup) -> Iterator[None]:
    """What the block raises on one rank, all raise. Collective over the host group."""
    error: Exception | None = None
    try:
        yield
    except Exception as e:  # travels to the other ranks
        error = e
    agreed = agree(error, host_group)
    if agreed is not None:
        raise agreed from (None if agreed is error else error)


def _initial_fields(part: TablePart) -> dict[str, Any]:
    fields = part.table.initializer.to_spec_fields()
    if fields["bank"] is not None and not part.is_whole:
        fields["bank"] = fields["bank"][:, part.first_column : part.first_column + part.dim].copy()
    return fields


def _choice(what: str, value: Any, allowed: Sequence[str]) -> str | None:
    """The name of one of TorchRec's enum members, or None."""
    name: str | None = getattr(value, "value", value)
    if name is not None and name not in allowed:
        raise ConfigError(
            f"{what}={value!r} does not exist for hashed tables. Pass one of {', '.join(map(repr, allowed))}, or None "
            "to leave the choice to the plan."
        )
    return name


def _nominal_parameter(module: HashCollection, table: TableConfig) -> nn.Parameter:
    return module.bag_of(table.name).weight
