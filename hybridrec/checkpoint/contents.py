"""What a snapshot has beside rows: the state of optimizers, and plain values that need no code to be read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from hybridrec.backend import HOST
from hybridrec.checkpoint.sharded import MODEL, OPTIMIZER
from hybridrec.checkpoint.small_files import is_number, is_plain
from hybridrec.distributed.fused_optimizer import HashFusedOptimizer
from hybridrec.distributed.model_parts import without_wrapper
from hybridrec.distributed.sharded_tensors import (
    check_trained_alike,
    fused_states,
    is_fused,
    sharded_weights,
    unwrapped,
)
from hybridrec.errors import ConfigError

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "param_names"}
"""What parameter groups have beside the settings of their optimizer."""
_PLAIN = (str, int, float, bool, bytes, type(None))
_STATES_LIKE_PARAMETERS = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)
"""Each of their states is one value, or has the shape of its parameter."""


# ---- optimizers ----------------------------------------------------------------------------------------------------


def _leaves(optimizer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The optimizers that a `CombinedOptimizer` is made of, however deep, with a path that names them."""
    if not isinstance(optimizer, CombinedOptimizer):
        yield path, optimizer
        return
    for number, (name, part) in enumerate(optimizer.optimizers):
        yield from _leaves(part, f"{path}/{without_wrapper(name) or number}")


def learning_rates(optimizer: Any) -> dict[str, Any]:
    """Path of a sharded table -> learning rate; of the tables that this rank has."""
    return {
        f"{path.rpartition('/')[0]}:{key.rpartition('.')[0]}": group["lr"]
        for path, leaf in _leaves(optimizer)
        if is_fused(leaf)
        for group in leaf.param_groups
        for key in leaf.params
    }


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """What an optimizer has that is not sharded tables', as plain values; tensors are not copied."""
    return {path: _leaf_state(leaf) for path, leaf in _leaves(optimizer) if not is_fused(leaf)}


def sharded_tensors(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What torch itself shards: ``"model.{name}"`` -> weights, ``"optimizer.{name}"`` -> fused states. Views.

    States have the names of the tables that this rank has a part of.

    Raises:
        ConfigError: Something cannot be saved; names it.
    """
    weights = sharded_weights(model)
    found = {f"{MODEL}{name}": value for name, value in weights.items()}
    for path, leaf in _leaves(optimizer) if weights and optimizer is not None else ():
        if not is_fused(leaf):
            check_trained_alike(model, weights, (p for group in leaf.param_groups for p in group["params"]))
        elif not isinstance(leaf, HashFusedOptimizer):
            found |= {f"{OPTIMIZER}{path.rpartition('/')[0]}:{name}": v for name, v in fused_states(leaf)}
    return found


def without_optimizer(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `sharded_tensors` that are the model's."""
    return {name: value for name, value in tensors.items() if name.startswith(MODEL)}


def weights_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the model, as the model names them."""
    return {name.removeprefix(MODEL): value for name, value in without_optimizer(tensors).items()}


def _leaf_state(optimizer: Any) -> dict[str, Any]:
    if not isinstance(optimizer, KeyedOptimizer):
        return {"kind": "torch", "state": optimizer.state_dict()}
    names = {id(p): name for name, p in optimizer.params.items()}
    state = {name: dict(optimizer.state[p]) for name, p in optimizer.params.items() if p in optimizer.state}
    groups = [
        {k: [names[id(p)] for p in v] if k == "params" else v for k, v in g.items()} for g in optimizer.param_groups
    ]
    return {"kind": "keyed", "state": _without_wrappers(state), "groups": groups}


def load_optimizer_state(optimizer: Any, saved: Mapping[str, Any], rates: Mapping[str, Any]) -> None:
    """Put back what `optimizer_state` and `learning_rates` took. `check_optimizer_state` was asked."""
    now = learning_rates(optimizer)
    for path, leaf in _leaves(optimizer):
        if is_fused(leaf):
            for group, key in ((group, key) for group in leaf.param_groups for key in leaf.params):
                name = f"{path.rpartition('/')[0]}:{key.rpartition('.')[0]}"
                group["lr"] = rates.get(name, now[name])
            leaf.zero_grad()  # hands the learning rate on
        else:
            _load_leaf(leaf, saved[path])


def _load_leaf(optimizer: Any, saved: Mapping[str, Any]) -> None:
    if saved["kind"] == "torch":
        optimizer.load_state_dict(saved["state"])
        return
    for group, state in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({k: v for k, v in state.items() if k != "params"})
    for name, p in optimizer.params.items():
        state = saved["state"].get(without_wrapper(name))
        if state is None:
            optimizer.state.pop(p, None)
        else:
            optimizer.state[p] = {k: _beside(v, p) for k, v in state.items()}


def check_optimizer_state(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Refuse an optimizer that is not made as the saved one was.

    Raises:
        ConfigError: Names the part, and both.
    """
    now = optimizer_state(optimizer)
    if list(now) != list(saved):
        raise ConfigError(f"optimizer: the snapshot has the parts {list(saved)}, this one has {list(now)}.")
    for path, leaf in _leaves(optimizer):
        if path not in saved:
            continue
        mine, theirs, where = now[path], saved[path], f"optimizer {path!r}" if path else "optimizer"
        if mine["kind"] != theirs["kind"]:
            raise ConfigError(f"{where}: the snapshot has a {theirs['kind']} optimizer, this one is {mine['kind']}.")
        _check_groups(where, _groups(theirs), _groups(mine))
        parameters = _parameters(leaf)
        if unknown := sorted(set(_states(theirs)) - parameters.keys()):
            raise ConfigError(f"{where}: the snapshot has state of {unknown}. Parameters here: {sorted(parameters)}.")
        has_like = type(unwrapped(leaf)) in _STATES_LIKE_PARAMETERS
        for name, states in _states(theirs).items():
            like = parameters[name] if has_like else None
            for key, value in states.items():
                _check_state(f"{where}: {key!r} of {name!r}", value, _states(mine).get(name, {}).get(key), like)


def _parameters(leaf: Any) -> dict[str | int, Tensor]:
    """By what names them in `_leaf_state`."""
    if isinstance(leaf, KeyedOptimizer):
        return {without_wrapper(name): p for name, p in leaf.params.items()}
    return dict(enumerate(p for group in leaf.param_groups for p in group["params"]))


def _states(leaf: Mapping[str, Any]) -> Mapping[Any, Mapping[str, Any]]:
    """Of each parameter, in what `_leaf_state` gave."""
    states: Mapping[Any, Mapping[str, Any]] = leaf["state"] if leaf["kind"] == "keyed" else leaf["state"]["state"]
    return states


def _check_state(what: str, saved: Any, now: Any, like: Tensor | None) -> None:
    """A state of a parameter has the shape, and the kind of values, of that which is there.

    Args:
        what: It is, for the message.
        saved: In the snapshot.
        now: What the optimizer has; None: nothing yet.
        like: The parameter, if all states of such an optimizer are like it, or one value.
    """
    shapes = [] if like is None else [[], [1], list(like.shape)]
    is_float = None
    if isinstance(now, Tensor):
        shapes, is_float = [list(now.shape)], now.is_floating_point()
    if isinstance(saved, Tensor):
        shape, is_right = list(saved.shape), is_plain(saved) and is_float in (None, saved.is_floating_point())
    else:
        shape, is_right = [], not shapes or is_number(saved) or (saved is None and now is None)
    if not is_right or (shapes and shape not in shapes):
        kind = f"{saved.dtype} {shape}" if isinstance(saved, Tensor) else f"a {type(saved).__name__}"
        raise ConfigError(
            f"{what} is {kind} in the snapshot. Accepted: shapes {shapes or 'of any kind'}, values like those of now."
        )


def _groups(leaf: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups in what `_leaf_state` gave."""
    return list(leaf["groups"] if leaf["kind"] == "keyed" else leaf["state"]["param_groups"])


def _check_groups(where: str, saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Of optimizers of one class each has what the other has, but for what another version of torch adds."""
    counts = [len(group["params"]) for group in saved], [len(group["params"]) for group in now]
    if counts[0] != counts[1]:
        raise ConfigError(
            f"{where}: the snapshot has {len(saved)} parameter groups, of {counts[0]} parameters, this one has "
            f"{len(now)}, of {counts[1]}."
        )
    for before, after in zip(saved, now, strict=True):
        left, come = before.keys() - after.keys() - _OF_SCHEDULERS, after.keys() - before.keys() - _OF_SCHEDULERS
        if left and come:
            raise ConfigError(
                f"{where}: it is of another class than that of the snapshot, whose groups have {sorted(left)}; those "
                f"of this one have {sorted(come)}. Pass an optimizer like the one that was saved."
            )
        for key in before.keys() & after.keys() - {"params"}:
            if not _is_like(before[key], after[key]):
                raise ConfigError(f"{where}: {key!r} is {before[key]!r} in the snapshot and {after[key]!r} here.")


def _is_like(before: Any, after: Any) -> bool:
    """Whether two settings of an optimizer can stand for each other."""
    if is_number(before) and is_number(after):
        return True
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        return len(before) == len(after) and all(map(_is_like, before, after))
    return before is None or after is None or type(before) is type(after)


def _without_wrappers(state: Mapping[str, Any]) -> dict[str, Any]:
    return {without_wrapper(name): value for name, value in state.items()}


def _beside(value: Any, parameter: Tensor) -> Any:
    """A loaded value where the optimizer keeps such values: steps stay in host memory."""
    is_like_parameter = isinstance(value, Tensor) and value.dim() > 0
    return value.to(parameter.device, copy=True) if is_like_parameter else value


# ---- plain values --------------------------------------------------------------------------------------------------


def copy_of(value: Any, path: str) -> Any:
    """A copy in host memory of what can be saved without pickling code: tensors, numbers, strings, lists, dicts.

    Raises:
        ConfigError: Something else is in it; names where.
    """
    if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
        return value.detach().to(HOST, copy=True)
    if isinstance(value, Mapping):
        return {_key(k, path): copy_of(v, f"{path}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        copied = [copy_of(v, f"{path}[{i}]") for i, v in enumerate(value)]
        return tuple(copied) if isinstance(value, tuple) else copied
    if isinstance(value, _PLAIN):
        return value
    raise ConfigError(
        f"{path} has type {type(value).__name__}, which a snapshot cannot hold. Accepted: tensors, numbers, strings, "
        "bytes, None, and lists, tuples and dicts of them."
    )


def _key(key: Any, path: str) -> Any:
    if not isinstance(key, (str, int)):
        raise ConfigError(f"{path} has the key {key!r}. Accepted: strings and ints.")
    return key


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of torch's generators that a model on a device uses."""
    state = {HOST.type: torch.get_rng_state()}
    module = torch.get_device_module(device)
    if device.type not in state and hasattr(module, "get_rng_state"):
        state[device.type] = module.get_rng_state(device)
    return state


def check_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Raise what `set_random_state` would raise; the generators stay as they are."""
    now = random_state(device)
    try:
        set_random_state(state, device)
    finally:
        set_random_state(now, device)


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Put `random_state` back; what is of another type of device is left out."""
    torch.set_rng_state(state[HOST.type])
    if device.type in state and device != HOST:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
