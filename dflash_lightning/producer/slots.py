"""Slots of host memory that carry hidden states from a worker process to the trainer, without a copy between them.

The memory is an anonymous file (`memfd_create`): it is not bound by the size of `/dev/shm`, has no name to leave
behind, and goes with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ALIGN = 4096
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class SlotShape:
    """Sizes of a slot: T_max packed tokens of `width` hidden values (and `last_width` more, 0 = none) in `dtype`."""

    max_tokens: int
    width: int
    last_width: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def hidden_bytes(self) -> int:
        return _aligned(self.max_tokens * self.width * self.torch_dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot: hidden states, then the last hidden state, then int32 ids, then the uint8 mask."""
        last = _aligned(self.max_tokens * self.last_width * self.torch_dtype.itemsize)
        return self.hidden_bytes + last + _aligned(self.max_tokens * 4) + _aligned(self.max_tokens)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class SlotViews:
    """Tensors that lie in a slot. Rows past the batch's own tokens hold old data."""

    hidden_states: Tensor  # [T_max, width]
    last_hidden_state: Tensor | None  # [T_max, last_width]
    input_ids: Tensor  # [T_max] int32
    loss_mask: Tensor  # [T_max] uint8

    def head(self, num_tokens: int) -> SlotViews:
        """The first `num_tokens` rows, still inside the slot."""
        last = self.last_hidden_state
        return SlotViews(
            self.hidden_states[:num_tokens],
            None if last is None else last[:num_tokens],
            self.input_ids[:num_tokens],
            self.loss_mask[:num_tokens],
        )


class SlotMemory:
    """`count` slots in one anonymous file, mapped by this process.

    Args:
        shape: size of a slot.
        count: number of slots.
        fd: descriptor of existing memory (a worker's side); None creates it.
    """

    def __init__(self, shape: SlotShape, count: int, fd: int | None = None) -> None:
        self.shape = shape
        self.count = count
        size = max(shape.nbytes * count, _ALIGN)
        self.fd = os.memfd_create("dflash-hidden-states", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)

    def views(self, slot: int) -> SlotViews:
        """Tensors over slot number `slot`."""
        assert 0 <= slot < self.count
        shape = self.shape
        offset = slot * shape.nbytes
        hidden = self._tensor(offset, shape.torch_dtype, shape.width)
        offset += shape.hidden_bytes
        last = None
        if shape.last_width:
            last = self._tensor(offset, shape.torch_dtype, shape.last_width)
            offset += _aligned(shape.max_tokens * shape.last_width * shape.torch_dtype.itemsize)
        ids = self._tensor(offset, torch.int32, 1).squeeze(1)
        offset += _aligned(shape.max_tokens * 4)
        return SlotViews(hidden, last, ids, self._tensor(offset, torch.uint8, 1).squeeze(1))

    def _tensor(self, offset: int, dtype: torch.dtype, width: int) -> Tensor:
        count = self.shape.max_tokens * width
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(-1, width)

    def pin(self) -> None:
        """Register the memory with CUDA, so that copies to and from it run beside other work.

        Raises:
            RuntimeError: CUDA refuses, mostly for want of lockable memory.
        """
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()
        code = runtime.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
        if int(code) != 0:
            raise RuntimeError(f"CUDA cannot pin {whole.numel() / 2**30:.1f} GiB of hidden-state slots: error {code}")

    def close(self) -> None:
        """Give up this process's descriptor; the mapping goes when the last tensor over it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def check_memory(shape: SlotShape, count: int) -> None:
    """Raise ValueError when `count` slots do not fit into the memory that this process may still take."""
    available = available_memory()
    needed = shape.nbytes * count
    if available is not None and needed > available:
        raise ValueError(
            f"data.queue_depth: {count} slots of {shape.nbytes / 2**30:.2f} GiB need {needed / 2**30:.1f} GiB of host "
            f"memory, {available / 2**30:.1f} GiB are free: {available // shape.nbytes} slots would fit; lower "
            "data.queue_depth or data.token_budget"
        )


def available_memory() -> int | None:
    """Bytes that the machine and the control group still give; None where neither can be read."""
    limits = []
    try:
        text = Path("/proc/meminfo").read_text()
        limits.append(int(text.split("MemAvailable:")[1].split()[0]) * 1024)
    except (OSError, IndexError):
        pass
    for limit, used in _CGROUP_FILES:
        try:
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return max(0, min(limits)) if limits else None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
