"""Blocks of a device's memory, as torch's caching allocators give them out: what a tensor takes there.

The rules of CUDACachingAllocator.cpp (torch) and NPUCachingAllocator.cpp (torch_npu), which are the same
but for 32 bytes that torch_npu adds to each tensor. With ``expandable_segments`` only rounding is left.
"""

from __future__ import annotations

import bisect
import os

ROUNDING = 512
SMALL = 1 << 20
"""The largest tensor of the small pool; a free rest of at most this is not split off in the large one."""

SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
LARGE = 10 << 20
"""From this on a tensor gets a segment of its own, a multiple of ``SEGMENT_ROUNDING``."""

SEGMENT_ROUNDING = 2 << 20
PADDING = {"npu": 32}
SETTINGS = {
    "cuda": ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "npu": ("PYTORCH_NPU_ALLOC_CONF",),
}


def uses_expandable_segments(device: str) -> bool:
    """Whether this process's environment asks the allocator for them."""
    texts = (os.environ.get(name, "").replace(" ", "") for name in SETTINGS.get(device, ()))
    return any("expandable_segments:True" in text for text in texts)


class Blocks:
    """The bytes of blocks given out so far; blocks that come back are not merged with others."""

    def __init__(self, device: str) -> None:
        self.padding = PADDING.get(device, 0)
        self.expandable = uses_expandable_segments(device)
        self.allocated = 0
        self._free: dict[bool, list[int]] = {True: [], False: []}

    def take(self, size: int) -> int:
        """Bytes of the block that a tensor of ``size`` bytes gets; an empty one gets none."""
        if not size:
            return 0
        wanted = max(1, -(-(size + self.padding) // ROUNDING)) * ROUNDING
        block = wanted if self.expandable else self._block(wanted)
        self.allocated += block
        return block

    def give_back(self, block: int) -> None:
        """Take back a block that ``take`` gave."""
        self.allocated -= block
        if block and not self.expandable:
            bisect.insort(self._free[block <= SMALL], block)

    def _block(self, wanted: int) -> int:
        small = wanted <= SMALL
        free = self._free[small]
        at = bisect.bisect_left(free, wanted)  # the smallest that is large enough
        found = free.pop(at) if at < len(free) else _segment(wanted)
        rest = found - wanted
        if rest > (0 if small else SMALL):
            bisect.insort(free, rest)
            return wanted
        return found


def _segment(wanted: int) -> int:
    if wanted <= SMALL:
        return SMALL_SEGMENT
    if wanted < LARGE:
        return LARGE_SEGMENT
    return -(-wanted // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
