#include "kernels/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvferry {
namespace {

// Below this, the partial cache lines at both ends outweigh what the non-temporal stores save.
constexpr std::size_t kStreamBytesMin = 256;

// Enough lines under way to hide the memory's latency, and few enough to be in the cache still when they are
// needed.
constexpr std::size_t kFetchAhead = 6144;

void copy_portable(std::byte* dst, const std::byte* src, std::size_t bytes) {
  std::memcpy(dst, src, bytes);
}

#if defined(__x86_64__)

std::size_t bytes_to_line(const std::byte* address) {
  return (64 - (reinterpret_cast<std::uintptr_t>(address) & 63)) & 63;
}

__attribute__((target("avx2"))) void copy_avx2(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (bytes < kStreamBytesMin) {
    std::memcpy(dst, src, bytes);
    return;
  }
  const std::size_t head = bytes_to_line(dst);
  std::memcpy(dst, src, head);
  std::size_t at = head;
  for (; at + 64 <= bytes; at += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + at), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + at + 32), b);
  }
  std::memcpy(dst + at, src + at, bytes - at);
}

__attribute__((target("avx512f"))) void copy_avx512(std::byte* dst, const std::byte* src, std::size_t bytes) {
  if (bytes < kStreamBytesMin) {
    std::memcpy(dst, src, bytes);
    return;
  }
  const std::size_t head = bytes_to_line(dst);
  std::memcpy(dst, src, head);
  std::size_t at = head;
  for (; at + 256 <= bytes; at += 256) {
    const __m512i a = _mm512_loadu_si512(src + at);
    const __m512i b = _mm512_loadu_si512(src + at + 64);
    const __m512i c = _mm512_loadu_si512(src + at + 128);
    const __m512i d = _mm512_loadu_si512(src + at + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 192), d);
  }
  for (; at + 64 <= bytes; at += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), _mm512_loadu_si512(src + at));
  }
  std::memcpy(dst + at, src + at, bytes - at);
}

#endif

using CopyPiece = void (*)(std::byte*, const std::byte*, std::size_t);

CopyPiece piece_function(CopyVariant variant) {
  switch (variant) {
    case CopyVariant::kPortable:
      return copy_portable;
#if defined(__x86_64__)
    case CopyVariant::kAvx2:
      return copy_avx2;
    case CopyVariant::kAvx512:
      return copy_avx512;
#else
    case CopyVariant::kAvx2:
    case CopyVariant::kAvx512:
      return copy_portable;
#endif
  }
  return copy_portable;
}

void copy_pieces(CopyPiece copy, std::byte* dst, const std::byte* src, std::size_t piece_bytes,
                 std::size_t count, std::size_t dst_stride, std::size_t src_stride) {
  if (count == 0 || piece_bytes == 0) {
    return;
  }
  if (dst_stride == piece_bytes && src_stride == piece_bytes) {
    copy(dst, src, piece_bytes * count);
    return;
  }
  for (std::size_t k = 0; k < count; ++k) {
    copy(dst + k * dst_stride, src + k * src_stride, piece_bytes);
  }
}

}  // namespace

std::string_view to_string(CopyVariant variant) {
  switch (variant) {
    case CopyVariant::kPortable:
      return "portable";
    case CopyVariant::kAvx2:
      return "avx2";
    case CopyVariant::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<CopyVariant> copy_variants() {
  std::vector<CopyVariant> variants;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    variants.push_back(CopyVariant::kAvx512);
  }
  if (__builtin_cpu_supports("avx2")) {
    variants.push_back(CopyVariant::kAvx2);
  }
#endif
  variants.push_back(CopyVariant::kPortable);
  return variants;
}

void copy_run(std::byte* dst, const std::byte* src, std::size_t piece_bytes, std::size_t count,
              std::size_t dst_stride, std::size_t src_stride) {
  static const CopyPiece copy = piece_function(copy_variants().front());
  copy_pieces(copy, dst, src, piece_bytes, count, dst_stride, src_stride);
}

void copy_gather(std::byte* dst, std::span<const std::span<const std::byte>> pieces) {
  std::size_t fetched = 0;        // first piece that has not been asked for
  std::size_t bytes_fetched = 0;  // of the pieces before it
  std::size_t at = 0;
  for (const auto& piece : pieces) {
    while (fetched < pieces.size() && bytes_fetched < at + kFetchAhead) {
      const auto& next = pieces[fetched++];
      for (std::size_t line = 0; line < next.size(); line += 64) {
        __builtin_prefetch(next.data() + line, 0, 2);
      }
      bytes_fetched += next.size();
    }
    std::memcpy(dst + at, piece.data(), piece.size());
    at += piece.size();
  }
}

void copy_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

void copy_run_with(CopyVariant variant, std::byte* dst, const std::byte* src, std::size_t piece_bytes,
                   std::size_t count, std::size_t dst_stride, std::size_t src_stride) {
  copy_pieces(piece_function(variant), dst, src, piece_bytes, count, dst_stride, src_stride);
}

}  // namespace kvferry
