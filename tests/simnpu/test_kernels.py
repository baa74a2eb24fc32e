"""Operators: a device tensor gives what the same operators give on the host, bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks import RankPools

NPU = "npu"


def samples(device: str) -> dict[str, Any]:
    """Results of many operators on fixed inputs."""
    torch.manual_seed(3)
    rows, other = torch.randn(10, 4).to(device), torch.randn(10, 4).to(device)
    ids = torch.tensor([7, 1, 3, 3, 0]).to(device)
    results: dict[str, Any] = {
        "index_select": rows.index_select(0, ids),
        "index": rows[ids],
        "index_copy": rows.clone().index_copy_(0, ids[:2], other[:2]),
        "index_put": rows.clone().index_put_((ids[:2],), torch.tensor(5.0)),
        "index_add": rows.clone().index_add_(0, ids, other[:5]),
        "sort": torch.sort(ids, stable=True),
        "unique": torch.unique_consecutive(ids.sort()[0], return_counts=True),
        "cumsum out": torch.cumsum(ids, 0, out=torch.zeros(5, dtype=torch.int64, device=device)),
        "resized out": torch.cumsum(ids, 0, out=torch.empty(0, dtype=torch.int64, device=device)),
        "nonzero": ids.nonzero(),
        "bincount": ids.bincount(),
        "where": torch.where(rows > 0, rows, other),
        "repeat_interleave": ids.repeat_interleave(torch.tensor([1, 0, 2, 1, 1]).to(device), output_size=5),
        "matmul": rows @ other.t(),
        "bags": torch.embedding_bag(rows, ids, torch.tensor([0, 2, 2, 5]).to(device), include_last_offset=True)[0],
        "halves": (rows.bfloat16() @ other.bfloat16().t()).float(),
        "item": rows.sum().item(),
        "empty": rows[:0].sum(0),
    }
    view = rows.clone()
    view.view(-1)[5:8].fill_(1.0)
    view.t()[0].add_(2)
    view[2:].unfold(0, 2, 2).mul_(3)
    results["views"] = view
    results["split"] = [part.contiguous() for part in rows.split([3, 7])]
    return results


def train(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    inputs, labels = torch.randn(16, 4).to(device), torch.rand(16, 1).round().to(device)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_same(on_device: Any, on_host: Any) -> None:
    if isinstance(on_host, Tensor):
        assert on_device.device.type == NPU
        assert torch.equal(on_device.cpu(), on_host)
        assert on_device.dtype == on_host.dtype and on_device.stride() == on_host.stride()
    elif isinstance(on_host, (tuple, list)):
        assert len(on_device) == len(on_host)
        for a, b in zip(on_device, on_host, strict=True):
            assert_same(a, b)
    else:
        assert on_device == on_host


def compare_operators() -> int:
    on_device, on_host = samples(NPU), samples("cpu")
    for name, expected in on_host.items():
        try:
            assert_same(on_device[name], expected)
        except AssertionError as e:
            raise AssertionError(name) from e
    assert_same(train(NPU), train("cpu"))
    return len(on_host)


def test_operators_give_the_host_s_bits(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(compare_operators) == [20]


def save_and_load() -> None:
    tensor = torch.arange(6.0).view(2, 3).to(NPU)
    file = io.BytesIO()
    torch.save({"x": tensor}, file)
    for where in (None, "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["x"]
        assert loaded.device.type == (where or NPU)
        assert torch.equal(loaded.cpu(), tensor.cpu())
    twin = copy.deepcopy(tensor)
    twin.zero_()
    assert tensor.sum().item() == 15


def test_tensors_can_be_saved_loaded_and_copied(npu_pools: RankPools) -> None:
    npu_pools[1].run(save_and_load)


def fbgemm_operators() -> None:
    import torchrec  # noqa: F401  # registers them

    lengths = torch.tensor([2, 0, 1])
    values = torch.tensor([10, 11, 12])
    results = []
    for device in ("cpu", NPU):
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.to(device))
        order = torch.tensor([2, 0, 1], dtype=torch.int32).to(device)
        args = (lengths.view(3, 1).to(device), values.to(device), None, None)
        results.append([offsets, *torch.ops.fbgemm.permute_2D_sparse_data(order, *args)[:2]])
    assert_same(results[1], results[0])


def test_fbgemm_s_operators_run(npu_pools: RankPools) -> None:
    npu_pools[1].run(fbgemm_operators)


def use_missing() -> tuple[list[str], list[str]]:
    """Operators without a kernel on a real NPU, which would run on the CPU there: what is refused, and what runs."""
    import torchrec  # noqa: F401  # registers FBGEMM's

    ids, offsets = torch.tensor([1, 2, 2], device=NPU), torch.tensor([0, 2, 3], device=NPU)
    bag = nn.EmbeddingBag(4, 4, include_last_offset=True).to(NPU)
    refused, ran = [], []
    for use in (
        lambda: bag(ids, offsets).sum().backward(),
        lambda: torch.segment_reduce(torch.ones(3, device=NPU), "sum", lengths=torch.tensor([1, 2], device=NPU)),
        lambda: torch.ones(3, device=NPU).geometric_(0.5),
        lambda: torch.ops.fbgemm.expand_into_jagged_permute(ids.int(), ids.int(), ids.int(), 3),
        lambda: torch.ops.fbgemm.invert_permute(torch.tensor([1, 0], dtype=torch.int32, device=NPU)),
        lambda: torch.ops.fbgemm.offsets_range(ids, 5),  # there on an A2, not on an A3
        lambda: ids << ids,
        lambda: torch.ops.fbgemm.asynchronous_complete_cumsum(ids),
    ):
        try:
            ran.append(use().tolist())
        except NotImplementedError as e:
            refused.append(str(e).partition(": ")[0])
    return refused, ran


def test_what_a_real_npu_lacks_is_refused(npu_pools: RankPools) -> None:
    ((refused, ran),) = npu_pools[1].run(use_missing)
    assert refused[0].startswith("aten::_embedding_bag") and refused[0].endswith("backward")
    assert refused[1:] == [
        "aten::segment_reduce",
        "aten::geometric_",
        "fbgemm::expand_into_jagged_permute",
        "fbgemm::invert_permute",
        "fbgemm::offsets_range",
    ]
    assert ran == [[2, 8, 8], [0, 1, 3, 5]]
