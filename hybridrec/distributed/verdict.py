"""One fixed-size message a step, by which all ranks learn that one of them refuses a batch.

Without it a rank that raises leaves the others waiting in the next collective.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridrec._compat.torch_distributed import all_gather_single
from hybridrec.errors import BackendError, CapacityError, ConfigError, HybridRecError, IdError, StateError

MESSAGE_BYTES = 1024
# The position is what travels. Anything else (an exception that is not ours) travels as the base class.
_CLASSES: tuple[type[HybridRecError], ...] = (
    HybridRecError,
    BackendError,
    CapacityError,
    ConfigError,
    IdError,
    StateError,
)
_HEADER_BYTES = 5  # answer, class, training, two of the length
_FITS, _REFUSED, _WITHDRAWN = range(3)


class Withdrawn(Exception):  # noqa: N818 - nothing is wrong
    """A rank takes a batch back before it is mapped, to map it again later. Never leaves this package."""


def agree(
    error: Exception | None, host_group: dist.ProcessGroup | None, *, is_training: bool = True
) -> Exception | None:
    """Exchange verdicts; collective over the host group.

    Args:
        error: What this rank has against the batch, or None.
        host_group: gloo group of all ranks; None for a single rank.
        is_training: Whether this rank's batch trains; ranks that differ would wait for each other in the backward.

    Returns:
        The error to raise, the same text and class on every rank: that of the lowest rank that refused. None if
        none did. On the rank where an exception that is not ours arose, that exception itself. `Withdrawn` if any rank
        gave that as its error.
    """
    if host_group is None or host_group.size() == 1:
        return error
    mine = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    mine[2] = int(is_training)
    if isinstance(error, Withdrawn):
        mine[0] = _WITHDRAWN
    elif error is not None:
        code = _CLASSES.index(type(error)) if type(error) in _CLASSES else 0
        text = str(error) if isinstance(error, HybridRecError) else f"{type(error).__name__}: {error}"
        payload = text.encode()
        if len(payload) > MESSAGE_BYTES - _HEADER_BYTES:
            payload = payload[: MESSAGE_BYTES - _HEADER_BYTES - 4] + b" ..."
        header = bytes([_REFUSED, code, is_training, *len(payload).to_bytes(2, "little")])
        mine[: len(header) + len(payload)] = torch.frombuffer(bytearray(header + payload), dtype=torch.uint8)
    everyone = torch.empty(host_group.size() * MESSAGE_BYTES, dtype=torch.uint8)
    all_gather_single(everyone, mine, group=host_group)
    everyone = everyone.view(host_group.size(), MESSAGE_BYTES)
    if (everyone[:, 0] == _WITHDRAWN).any():
        return Withdrawn()
    refusing = everyone[:, 0].nonzero().flatten().tolist()
    if not refusing:
        training = everyone[:, 2].tolist()
        if len(set(training)) == 1:
            return None
        modes = ", ".join(f"rank {r} {'trains' if t else 'reads'}" for r, t in enumerate(training))
        return StateError(
            f"the ranks do not agree on what this forward is: {modes}. Call train() or eval(), and torch.no_grad(), on "
            "all ranks alike. The batch was undone."
        )
    if error is not None and not isinstance(error, HybridRecError):
        return error
    first = refusing[0]
    message = bytes(everyone[first].tolist())
    length = int.from_bytes(message[3:_HEADER_BYTES], "little")
    text = message[_HEADER_BYTES : _HEADER_BYTES + length].decode(errors="replace")
    return _CLASSES[message[1]](
        f"{text} (refused by rank {first}; the batch was undone on all {host_group.size()} ranks)"
    )


def check_same_on_all_ranks(name: str, value: int, host_group: dist.ProcessGroup) -> None:
    """Collective over the host group.

    Raises:
        ConfigError: The ranks have different values; on all ranks alike.
    """
    if host_group.size() == 1:
        return
    values = torch.empty(host_group.size(), dtype=torch.int64)
    all_gather_single(values, torch.tensor([value]), group=host_group)
    if len(set(values.tolist())) > 1:
        listed = ", ".join(f"rank {r}: {v}" for r, v in enumerate(values.tolist()))
        raise ConfigError(f"{name} differs between ranks ({listed}), which would wait for each other. Pass one value.")
