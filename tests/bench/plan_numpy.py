"""The straightforward per-token method in NumPy, for comparison with plan_bench: for every decode rank, the owned
tokens, their rows on both sides, contiguous groups, and the addresses of every group for every layer.

Prints one JSON object. `seconds` ends with address arrays; `seconds_blocks` with the (source, destination, length)
lists of Python integers that transfer libraries take. Vectorised throughout: the method is the slow part, not its
programming.
"""

import argparse
import json
import statistics
import time

import numpy as np

MASK = (1 << 64) - 1


def shuffled_pages(count, seed):
    """The same permutation as plan_bench: splitmix64, Fisher-Yates from the end."""
    pages = list(range(count))
    state = seed
    for left in range(count, 1, -1):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        other = z % left
        pages[left - 1], pages[other] = pages[other], pages[left - 1]
    return np.array(pages, dtype=np.int64)


def plan(src_pages, dst_pages, tokens, page, ranks, rank, layer_bases, row_bytes):
    owned = np.arange(rank, tokens, ranks, dtype=np.int64)
    src_rows = src_pages[owned // page] * page + owned % page
    local = owned // ranks
    dst_rows = dst_pages[local // page] * page + local % page
    breaks = np.flatnonzero((np.diff(src_rows) != 1) | (np.diff(dst_rows) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [owned.size]))) * row_bytes
    src_starts = src_rows[starts] * row_bytes
    dst_starts = dst_rows[starts] * row_bytes
    layers = [(base + src_starts, base + dst_starts, lengths) for base in layer_bases]
    return src_rows, dst_rows, layers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--row-bytes", type=int, default=1152)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()

    src_pages = shuffled_pages(args.tokens // args.page, 1)
    dst_pages = shuffled_pages(args.tokens // args.page // args.ranks, 2)
    bases = [layer << 40 for layer in range(args.layers)]

    def all_ranks():
        return [
            plan(src_pages, dst_pages, args.tokens, args.page, args.ranks, rank, bases, args.row_bytes)
            for rank in range(args.ranks)
        ]

    arrays, blocks = [], []
    for _ in range(args.repeat):
        start = time.perf_counter()
        plans = all_ranks()
        arrays.append(time.perf_counter() - start)
    for _ in range(max(1, args.repeat // 3)):
        start = time.perf_counter()
        for _, _, layers in all_ranks():
            for src, dst, length in layers:
                (src.tolist(), dst.tolist(), length.tolist())
        blocks.append(time.perf_counter() - start)

    checksum = 0
    for src_rows, dst_rows, _ in plans:
        products = (src_rows.astype(np.uint64) + np.uint64(1)) * (dst_rows.astype(np.uint64) + np.uint64(7))
        checksum = (checksum + int(products.sum(dtype=np.uint64))) & MASK
    print(
        json.dumps(
            {
                "seconds": statistics.median(arrays),
                "seconds_blocks": statistics.median(blocks),
                "blocks": sum(src.size for _, _, layers in plans for src, _, _ in layers),
                "checksum": checksum,
            }
        )
    )


if __name__ == "__main__":
    main()
