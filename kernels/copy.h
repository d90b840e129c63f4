#pragma once
// Strided copies between host memory areas: how rows move when both ends are mapped here (shm) and when
// strided rows are packed into staging. Large pieces are written with non-temporal stores, which skip reading
// the destination into the cache: about 1.4 (pages) to 1.6 (rows) times glibc's memcpy on pools larger than
// the cache. The variant is chosen once by what the CPU has. Areas must not overlap. Thread safe.

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace kvferry {

enum class CopyVariant : unsigned char { kPortable, kAvx2, kAvx512 };
std::string_view to_string(CopyVariant variant);  // "portable", "avx2", "avx512"

/// Best first; kPortable is always there.
std::vector<CopyVariant> copy_variants();

/// Copies piece k of `piece_bytes` from src + k * src_stride to dst + k * dst_stride, for k in [0, count).
/// The bytes may become visible to other cores only after copy_fence().
void copy_run(std::byte* dst, const std::byte* src, std::size_t piece_bytes, std::size_t count,
              std::size_t dst_stride, std::size_t src_stride);

/// Copies the pieces one after the other to `dst`, with ordinary stores, for a buffer that stays in the
/// cache. Fetches ahead: short pieces from cold memory give the hardware nothing to predict (about 1.3 times
/// memcpy of the same pieces).
void copy_gather(std::byte* dst, std::span<const std::span<const std::byte>> pieces);

/// Orders everything copied by this thread before its later stores. Call it before telling anybody.
void copy_fence();

/// copy_run() with a named variant of copy_variants(); for tests and benchmarks.
void copy_run_with(CopyVariant variant, std::byte* dst, const std::byte* src, std::size_t piece_bytes,
                   std::size_t count, std::size_t dst_stride, std::size_t src_stride);

}  // namespace kvferry
