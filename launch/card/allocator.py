"""What PyTorch's allocator takes from a card for a sequence of tensors: more than their sum.

    tensor     rounded up to 512 bytes
    segment    what is asked of the driver: 2 MiB for tensors up to 1 MiB, 20 MiB for those below 10 MiB, else the
               tensor rounded up to 2 MiB
    block      part of a segment; a tensor takes the smallest free block that is large enough, and the rest of it stays
               free if it is larger than 1 MiB (in segments of 2 MiB: if anything is left)

Free blocks beside each other become one, and a segment is given back only if all of it is free and the cache is
released. So memory that is free can still be too scattered for a tensor. This follows PyTorch's
c10/cuda/CUDACachingAllocator.cpp with its defaults.

Left out: streams (there is one), expandable segments, pools of CUDA graphs, and the second attempt after the driver had
no memory, which releases the cache first.
"""

import bisect
from dataclasses import dataclass, field

MIB = 2**20
UNIT = 512
SMALL = MIB
"""Up to this size, tensors share segments of their own."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
"""From this size on, a segment is made for the tensor."""
ROUND_SEGMENT = 2 * MIB


def rounded(num_bytes: int) -> int:
    """A tensor without elements takes nothing."""
    return -(-num_bytes // UNIT) * UNIT


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    number: int
    """Older blocks have smaller ones."""
    size: int
    is_small: bool
    """Whether its segment is for small tensors."""
    before: "Block | None" = None
    """Its neighbour in the segment."""
    after: "Block | None" = None
    is_free: bool = True


@dataclass
class Allocator:
    """The segments and blocks of one process."""

    reserved: int = 0
    """Bytes in segments."""
    taken: dict[int, Block] = field(default_factory=dict[int, Block])
    """By tensor."""
    free: dict[bool, list[tuple[int, int, Block]]] = field(default_factory=lambda: {True: [], False: []})
    """Size, number and block of the free ones, sorted: of segments for small tensors, and of the others."""
    made: int = 0
    """Blocks so far."""

    def take(self, key: int, num_bytes: int) -> None:
        """A new tensor."""
        size = rounded(num_bytes)
        if not size:
            return
        block = self.best_fit(size) or self.new_segment(size)
        rest = block.size - size
        if rest >= UNIT if block.is_small else rest > SMALL:
            self.split(block, size)
        block.is_free = False
        self.taken[key] = block

    def best_fit(self, size: int) -> Block | None:
        """The smallest free block that is large enough, no longer in the list."""
        blocks = self.free[size <= SMALL]
        place = bisect.bisect_left(blocks, size, key=lambda entry: entry[0])
        return blocks.pop(place)[2] if place < len(blocks) else None

    def new_segment(self, size: int) -> Block:
        if size <= SMALL:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        self.reserved += whole
        return self.new_block(whole, is_small=size <= SMALL)

    def new_block(self, size: int, *, is_small: bool) -> Block:
        self.made += 1
        return Block(number=self.made, size=size, is_small=is_small)

    def split(self, block: Block, size: int) -> None:
        """The rest becomes a free block behind it."""
        rest = self.new_block(block.size - size, is_small=block.is_small)
        rest.before, rest.after = block, block.after
        if block.after:
            block.after.before = rest
        block.size, block.after = size, rest
        self.put(rest)

    def give_back(self, key: int) -> None:
        """A tensor has ended."""
        block = self.taken.pop(key, None)
        if block is None:
            return
        block.is_free = True
        if block.after and block.after.is_free:
            self.remove(block.after)
            join(block, block.after)
        if block.before and block.before.is_free:
            self.remove(block.before)
            block = join(block.before, block)
        self.put(block)

    def release(self) -> None:
        """Segments without a tensor go back to the driver."""
        for is_small, blocks in self.free.items():
            whole = [block for _, _, block in blocks if not block.before and not block.after]
            self.reserved -= sum(block.size for block in whole)
            gone = {block.number for block in whole}
            self.free[is_small] = [entry for entry in blocks if entry[1] not in gone]

    def put(self, block: Block) -> None:
        bisect.insort(self.free[block.is_small], (block.size, block.number, block))

    def remove(self, block: Block) -> None:
        blocks = self.free[block.is_small]
        del blocks[bisect.bisect_left(blocks, (block.size, block.number), key=lambda entry: entry[:2])]


def join(first: Block, second: Block) -> Block:
    """Neighbours become one block."""
    first.size += second.size
    first.after = second.after
    if second.after:
        second.after.before = first
    return first
