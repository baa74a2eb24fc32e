"""TorchRec's planner taught two tiers: wraps around two functions, nothing replaced.

A hashed table's nominal parameter carries ``_hybrid_tiers``, a callable ``(kernel, world_size, load_factor) ->
(device bytes, host bytes)`` of one rank. Where it is present the planner accounts these instead of bytes that follow
from the nominal shape; the bytes of inputs and outputs stay TorchRec's. Parameters without it are untouched.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from hybridrec._compat.planner_device import install_device_wraps, planner_alias
from hybridrec._compat.torchrec import _fail
from hybridrec.backend import HOST

TIERS_ATTRIBUTE = "_hybrid_tiers"
# Relative to the same device's "fused": what decides when memory allows several kernels. Only the order matters.
_BANDWIDTH_SHARE = {"fused_uvm_caching": 0.5, "fused_uvm": 0.25}

_installed = False


def install_planner_wraps() -> None:
    """Install the wraps, once a process. Idempotent."""
    global _installed
    if _installed:
        return
    install_device_wraps()
    _wrap_storages()
    _wrap_bandwidths()
    _installed = True


def _wrap_storages() -> None:
    estimators = importlib.import_module("torchrec.distributed.planner.shard_estimators")
    storage_type = importlib.import_module("torchrec.distributed.planner.types").Storage
    inner = getattr(estimators, "calculate_shard_storages", None)
    if inner is None:
        raise _fail("planner.shard_estimators.calculate_shard_storages", "does not exist")

    @functools.wraps(inner)
    def calculate_shard_storages(*args: Any, **kwargs: Any) -> Any:
        tiers = getattr(kwargs.get("tensor"), TIERS_ATTRIBUTE, None)
        kwargs["compute_device"] = planner_alias(kwargs["compute_device"])
        if tiers is None:
            return inner(*args, **kwargs)
        # With a table of one row a rank TorchRec's own figure is inputs, outputs and that row.
        dim, num_shards = kwargs["tensor"].shape[1], len(kwargs["shard_sizes"])
        one_row_each = torch.empty((num_shards, dim), device="meta")
        shard_sizes = [[1, dim]] * num_shards
        in_and_out = inner(
            *args, **{**kwargs, "tensor": one_row_each, "shard_sizes": shard_sizes, "compute_kernel": "fused"}
        )
        device_bytes, host_bytes = tiers(kwargs["compute_kernel"], kwargs["world_size"], kwargs["caching_ratio"])
        if kwargs["compute_device"] == HOST.type:
            return [storage_type(hbm=s.hbm, ddr=s.ddr + device_bytes + host_bytes, ssd=s.ssd) for s in in_and_out]
        return [storage_type(hbm=s.hbm + device_bytes, ddr=s.ddr + host_bytes, ssd=s.ssd) for s in in_and_out]

    setattr(estimators, "calculate_shard_storages", calculate_shard_storages)  # noqa: B010 - a module from importlib


def _wrap_bandwidths() -> None:
    """Give the two-tier kernels a bandwidth on devices where TorchRec knows "fused" alone."""
    for module_name in ("torchrec.distributed.planner.constants", "torchrec.distributed.planner.estimator.types"):
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue  # TorchRec 1.5 has no estimator package; its estimators read `shard_estimators`, below
        _wrap_bandwidth_of(module)
    _wrap_bandwidth_of(importlib.import_module("torchrec.distributed.planner.shard_estimators"))


def _wrap_bandwidth_of(module: Any) -> None:
    inner = getattr(module, "kernel_bw_lookup", None)
    if inner is None:
        return

    @functools.wraps(inner)
    def kernel_bw_lookup(compute_device: str, compute_kernel: str, *args: Any, **kwargs: Any) -> Any:
        compute_device = planner_alias(compute_device)
        bandwidth = inner(compute_device, compute_kernel, *args, **kwargs)
        if bandwidth is None and compute_kernel in _BANDWIDTH_SHARE:
            fused = inner(compute_device, "fused", *args, **kwargs)
            return None if fused is None else fused * _BANDWIDTH_SHARE[compute_kernel]
        return bandwidth

    module.kernel_bw_lookup = kernel_bw_lookup
