"""Memory of the simulated device: blocks that only kernels can reach.

A tensor on the device has a real storage whose address lies in a region of the address space that nobody may read or
write: a host that dereferences it ends with a segmentation fault. Its bytes are elsewhere, in a `Block`, which also
knows which stream touched them when. Addresses are never used twice.

PyTorch offers Python no way to make such a storage but DLPack: a capsule of device type "extension" becomes a tensor
on PrivateUse1.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tests.simnpu.accesses import Accesses
from tests.simnpu.ordering import SyncHazard, current_stream, timeline

DEVICE_TYPE = "npu"
POISON = 0xCB
"""Byte of memory without a value: as float32 -26.7e6, loud, finite, and never a plausible value."""
DEFAULT_MEMORY_BYTES = 64 << 30

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ALIGNMENT = 512
_REGION_BYTES = 1 << 44


@dataclass(eq=False)
class Block:
    """One allocation."""

    data: Tensor
    """uint8 [bytes], host memory: what the block holds."""
    stream: int
    """Where it was allocated, and where its memory is reused once it is freed."""
    made_by: str
    """For messages."""
    recorded: set[int] = field(default_factory=set)
    """Streams that `record_stream` named: freeing waits for them."""
    accesses: Accesses = field(init=False)

    def __post_init__(self) -> None:
        self.accesses = Accesses(self.data.numel())


class _Heap:
    """All blocks, by device address."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.total_bytes = DEFAULT_MEMORY_BYTES
        self.used_bytes = self.peak_bytes = 0
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._next = libc.mmap(None, _REGION_BYTES, 0, flags, -1, 0)
        if self._next == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "no address space for the simulated device")
        self._end = self._next + _REGION_BYTES

    def take_address(self, num_bytes: int) -> int:
        address = self._next
        self._next += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._next > self._end:
            raise MemoryError(f"the simulated device has given out all of its {_REGION_BYTES} addresses; start anew")
        return address


heap = _Heap()


# ---- DLPack ----------------------------------------------------------------------------------------------------------


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_EXTENSION_DEVICE = 12
_UINT8 = _DLDataType(1, 8, 1)
_RECORD_BYTES = ctypes.sizeof(_DLManagedTensor)
_MAX_BLOCKS = 1 << 16
# A deleter must not be Python: tensors also die while an exception is on its way, and after the interpreter. libc's
# sem_post(record) adds one to the record's first word. ATen reads the record only while it takes the capsule, so
# afterwards it is zeroed, serves as a semaphore, and says by its value that the tensor has died.
_DELETER = ctypes.cast(ctypes.CDLL(None).sem_post, ctypes.c_void_p).value
_records = np.zeros((_MAX_BLOCKS, _RECORD_BYTES // 4), dtype=np.int32)
_free_records = list(range(_MAX_BLOCKS - 1, -1, -1))
_address_of_record: dict[int, int] = {}
_num_records_used = 0
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _device_bytes(block: Block) -> Tensor:
    """uint8 [bytes] on the device, the owner of a block: when its storage dies, the block is freed."""
    global _num_records_used
    num_bytes = block.data.numel()
    if not _free_records:
        raise MemoryError(f"the simulated device holds {_MAX_BLOCKS} blocks, which is its limit")
    number = _free_records.pop()
    _num_records_used = max(_num_records_used, number + 1)
    address = heap.take_address(num_bytes)
    record_address = _records.ctypes.data + _RECORD_BYTES * number
    record = _DLManagedTensor.from_address(record_address)
    shape, strides = (ctypes.c_int64 * 1)(num_bytes), (ctypes.c_int64 * 1)(1)
    record.data, record.ndim, record.device, record.dtype = address, 1, _DLDevice(_EXTENSION_DEVICE, 0), _UINT8
    record.shape, record.strides, record.byte_offset = shape, strides, 0
    record.manager_ctx, record.deleter = None, _DELETER
    owner = torch.utils.dlpack.from_dlpack(_new_capsule(record_address, b"dltensor", None))
    _records[number, : _RECORD_BYTES // 4 - 4] = 0  # all but the context and the deleter
    heap.blocks[address] = block
    _address_of_record[number] = address
    heap.used_bytes += num_bytes
    heap.peak_bytes = max(heap.peak_bytes, heap.used_bytes)
    return owner


# ---- allocation ------------------------------------------------------------------------------------------------------


def span_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first element to the end of the last."""
    if any(s == 0 for s in size):
        return 0
    return (1 + sum((s - 1) * st for s, st in zip(size, stride, strict=True))) * dtype.itemsize


def allocate_bytes(num_bytes: int, made_by: str) -> Tensor:
    """uint8 [num_bytes, at least 1] on the device, poisoned.

    Raises:
        torch.OutOfMemoryError: The device has no room.
    """
    num_bytes = max(num_bytes, 1)
    free_dead_blocks()
    _require_room(num_bytes)
    return _device_bytes(Block(torch.full((num_bytes,), POISON, dtype=torch.uint8), current_stream(), made_by))


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, made_by: str) -> Tensor:
    """A tensor on the device, poisoned."""
    return view_of(allocate_bytes(span_bytes(size, stride, dtype), made_by), dtype, size, stride)


def adopt(result: Tensor, made_by: str) -> Tensor:
    """uint8 on the device: the whole fresh storage of a kernel's result, without a copy."""
    storage = result.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    free_dead_blocks()
    _require_room(storage.nbytes())
    return _device_bytes(Block(data, current_stream(), made_by))


def view_of(
    owner: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0
) -> Tensor:
    """A tensor over the storage of another one on the device."""
    tensor = torch._C._acc.create_empty_tensor((0,), dtype)
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        _CPU_KEYS, tensor, owner.untyped_storage(), storage_offset, list(size), list(stride)
    )
    return tensor


def _require_room(num_bytes: int) -> None:
    if heap.used_bytes + num_bytes <= heap.total_bytes:
        return
    gc.collect()  # as an allocator that returns its cache: only cycles can still hold memory back
    free_dead_blocks()
    if heap.used_bytes + num_bytes > heap.total_bytes:
        raise torch.OutOfMemoryError(
            f"NPU out of memory. Tried to allocate {num_bytes} bytes; {heap.used_bytes} of {heap.total_bytes} are in "
            "use (simulated device)."
        )


def set_memory_bytes(total: int) -> None:
    """Memory of the device, in use or not: what ``mem_get_info`` reports and beyond which allocations fail."""
    with timeline.lock:
        heap.total_bytes = total


# ---- freeing ---------------------------------------------------------------------------------------------------------


def free_dead_blocks() -> None:
    """Take back the blocks whose tensors have died since the last call."""
    with timeline.lock:
        for number in np.flatnonzero(_records[:_num_records_used, 0]).tolist():
            _records[number] = 0
            block = heap.blocks.pop(_address_of_record.pop(number))
            _free_records.append(number)
            _free(block)


def _free(block: Block) -> None:
    heap.used_bytes -= block.data.numel()
    for stream, tick in block.accesses.last_uses().items():
        is_over = timeline.is_over({stream: tick}) or timeline.is_ordered(block.stream, stream, tick)
        if stream not in block.recorded and not is_over:
            timeline.report(
                f"memory of stream {block.stream} ({block.made_by}) was freed while stream {stream} may still use it: "
                f"call record_stream, or let stream {block.stream} wait for stream {stream} first"
            )
    block.data.fill_(POISON)


timeline.before_wait.append(free_dead_blocks)


# ---- access ----------------------------------------------------------------------------------------------------------


def is_on_device(value: object) -> bool:
    """Whether it is a tensor of the simulated device."""
    return isinstance(value, Tensor) and value.device.type == DEVICE_TYPE


def block_of(tensor: Tensor) -> Block:
    """The block under a device tensor."""
    return heap.blocks[tensor.untyped_storage().data_ptr()]


def host_alias(tensor: Tensor) -> Tensor:
    """The bytes of a device tensor as a host tensor. For kernels and copies alone."""
    if tensor.numel() == 0:  # a kernel may resize it: it gets memory of its own
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    storage = block_of(tensor).data.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def touch(tensor: Tensor, *, is_write: bool, what: str, rows: np.ndarray | None = None) -> None:
    """Note that the work just launched on the current stream uses a tensor's memory.

    Args:
        tensor: On the device.
        is_write: Whether it is written.
        what: The work, for messages.
        rows: int64, those of dimension 0 that are used; None: all of the tensor.

    Raises:
        SyncHazard: It is not ordered after a use by another stream, of which one writes.
    """
    if tensor.numel() == 0:
        return
    block, stream = block_of(tensor), current_stream()
    first_byte, clock = tensor.storage_offset() * tensor.element_size(), timeline.clocks[stream]
    if rows is None or tensor.size(0) == 1 or not tensor.is_contiguous():  # a stride may be longer than its row
        end_byte = first_byte + span_bytes(tensor.size(), tensor.stride(), tensor.dtype)
        granules = block.accesses.range_of(first_byte, end_byte)
    else:
        row_bytes = tensor.stride(0) * tensor.element_size()
        granules = block.accesses.rows_of(rows, first_byte=first_byte, row_bytes=row_bytes)
    conflict = block.accesses.conflict(granules, stream, clock, is_write=is_write)
    if conflict is not None:
        verb, other = conflict
        done = f"that stream {other} wrote last" if verb == "wrote" else f"that stream {other} may still be reading"
        use = "overwrites" if verb == "read" else "touches"
        timeline.fail(f"{what} on stream {stream} {use} memory ({block.made_by}) {done}, without waiting for it")
    block.accesses.note(granules, stream, clock[stream], is_write=is_write)


# ---- what tests ask --------------------------------------------------------------------------------------------------


def take_hazards() -> list[str]:
    """All hazards since the last call, of memory that is unreachable by now too."""
    gc.collect()
    return timeline.take_hazards()


def check_no_hazards() -> None:
    """Raise SyncHazard with all hazards since the last look, raised and reported ones; none is kept."""
    hazards = take_hazards()
    if hazards:
        raise SyncHazard(f"{len(hazards)} hazards on the simulated device:\n" + "\n".join(hazards))
