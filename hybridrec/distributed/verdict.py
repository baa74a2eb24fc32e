"""One fixed-size message a step, by which all ranks learn that one of them refuses a batch.

Without it a rank that raises leaves the others waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrec._compat.torch_distributed import all_gather_single
from hybridrec.distributed.watchdog import GroupBroken
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
_ANSWER, _CLASS, _HAS_ENDED, _LENGTH, _HEADER_BYTES = 0, 1, 2, 7, 9
_MODE = slice(3, 7)
MODES = 2**32
_FITS, _REFUSED, _WITHDRAWN, _STOPPED = range(4)


class Withdrawn(Exception):  # noqa: N818 - nothing is wrong
    """A rank takes a batch back before it is mapped, to map it again later. Never leaves this package."""


class DataEnded(Exception):  # noqa: N818 - nothing is wrong
    """There is no batch here that all ranks could compute. Never leaves this package."""

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        """``ranks``: whose iterators have ended; unknown before the verdict."""
        super().__init__()
        self.ranks = tuple(ranks)


def agree(
    error: Exception | None,
    host_group: dist.ProcessGroup | None,
    *,
    mode: int = 1,
    has_ended: bool = False,
    aftermath: str = "the batch was undone",
) -> Exception | None:
    """Exchange verdicts; collective over the host group.

    Args:
        error: What this rank has against the batch, or None.
        host_group: gloo group of all ranks; None for a single rank.
        mode: 0: this rank's batch reads; 1 to `MODES` - 1: it trains, and which tables. Ranks that differ would wait
            for each other in the backward.
        has_ended: Whether this rank has no batch of its own any more, and gives an empty one.
        aftermath: What is true on all ranks when one refused, for the message.

    Returns:
        The error to raise, the same text and class on every rank: that of the lowest rank that refused. None if
        none did. On the rank where an exception that is not ours arose, that exception itself. `Withdrawn` if any rank
        gave that as its error; `DataEnded` if any rank gave that, or if all have ended.
    """
    if host_group is None or host_group.size() == 1:
        return error
    mine = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    mine[_MODE] = torch.frombuffer(bytearray(mode.to_bytes(4, "little")), dtype=torch.uint8)
    mine[_HAS_ENDED] = int(has_ended or isinstance(error, DataEnded))
    if isinstance(error, DataEnded):
        mine[_ANSWER] = _STOPPED
    elif isinstance(error, Withdrawn):
        mine[_ANSWER] = _WITHDRAWN
    elif error is not None:
        code = _CLASSES.index(type(error)) if type(error) in _CLASSES else 0
        text = str(error) if isinstance(error, HybridRecError) else f"{type(error).__name__}: {error}"
        payload = text.encode()
        if len(payload) > MESSAGE_BYTES - _HEADER_BYTES:
            payload = payload[: MESSAGE_BYTES - _HEADER_BYTES - 4] + b" ..."
        mine[_ANSWER], mine[_CLASS] = _REFUSED, code
        content = bytearray(len(payload).to_bytes(2, "little") + payload)
        mine[_LENGTH : _LENGTH + len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    everyone = torch.empty(host_group.size() * MESSAGE_BYTES, dtype=torch.uint8)
    try:
        all_gather_single(everyone, mine, group=host_group)
    except RuntimeError as e:
        raise GroupBroken(f"the ranks could not agree on a batch: {e}") from e
    everyone = everyone.view(host_group.size(), MESSAGE_BYTES)
    answers, ended = everyone[:, _ANSWER], everyone[:, _HAS_ENDED].nonzero().flatten().tolist()
    if (answers == _STOPPED).any() or len(ended) == host_group.size():
        return DataEnded(ended)
    if (answers == _WITHDRAWN).any():
        return Withdrawn()
    refusing = answers.nonzero().flatten().tolist()
    if not refusing:
        training = [int.from_bytes(bytes(mode), "little") for mode in everyone[:, _MODE].tolist()]
        if len(set(training)) == 1:
            return None
        trains = "trains" if len({t for t in training if t}) < 2 else "trains some tables"
        modes = ", ".join(f"rank {r} {trains if t else 'reads'}" for r, t in enumerate(training))
        return StateError(
            f"the ranks do not agree on what this forward is: {modes}. Call train() or eval(), and torch.no_grad(), "
            "and set requires_grad of tables, on all ranks alike. The batch was undone."
        )
    if error is not None and not isinstance(error, HybridRecError):
        return error
    first = refusing[0]
    message = bytes(everyone[first].tolist())
    length = int.from_bytes(message[_LENGTH:_HEADER_BYTES], "little")
    text = message[_HEADER_BYTES : _HEADER_BYTES + length].decode(errors="replace")
    return _CLASSES[message[_CLASS]](f"{text} (refused by rank {first}; {aftermath} on all {host_group.size()} ranks)")
