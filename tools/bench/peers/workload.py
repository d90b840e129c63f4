"""The work that every peer does: which bytes of the source pool go where in the destination pool.

A pool is `layers` buffers of `pages` pages; a page is 64 rows of 1,152 B (DeepSeek-V3's latent row in bf16). Both sides
compute the same segments from the same seed, so only addresses are exchanged.
"""
import numpy as np

PAGE_ROWS = 64
ROW_BYTES = 1152
PAGE_BYTES = PAGE_ROWS * ROW_BYTES
DCP = 4
SEED = 20240917

ITEMS = {
    "pages": "same layout: every page, shuffled, to a shuffled page",
    "rows": "DCP 1 -> 4: every 4th row, into shuffled pages that it fills",
    "one-page": "latency of one page of all layers",
}


def pool_bytes(layers, pages):
    return layers * pages * PAGE_BYTES


def segments(item, layers, pages, repeat=0):
    """(destination offsets, source offsets, lengths), in the order of layers and tokens."""
    rng = np.random.default_rng((SEED, pages))
    src_pages = rng.permutation(pages).astype(np.uint64)
    dst_pages = rng.permutation(pages).astype(np.uint64)
    layer = np.arange(layers, dtype=np.uint64)[:, None] * np.uint64(pages * PAGE_BYTES)
    if item == "pages":
        src = src_pages * np.uint64(PAGE_BYTES)
        dst = dst_pages * np.uint64(PAGE_BYTES)
        length = PAGE_BYTES
    elif item == "one-page":
        # Another page each time: one that stays in the cache would be another measurement.
        src = src_pages[repeat % pages:][:1] * np.uint64(PAGE_BYTES)
        dst = dst_pages[repeat % pages:][:1] * np.uint64(PAGE_BYTES)
        length = PAGE_BYTES
    elif item == "rows":
        token = np.arange(0, pages * PAGE_ROWS, DCP, dtype=np.uint64)
        own = token // np.uint64(DCP)
        rows = np.uint64(PAGE_ROWS)
        src = (src_pages[token // rows] * rows + token % rows) * np.uint64(ROW_BYTES)
        dst = (dst_pages[own // rows] * rows + own % rows) * np.uint64(ROW_BYTES)
        length = ROW_BYTES
    else:
        raise ValueError(f"no such work item: {item}")
    src_at = (layer + src).ravel()
    dst_at = (layer + dst).ravel()
    return dst_at, src_at, np.full(src_at.shape, length, dtype=np.uint64)
