#include <array>
#include <utility>

#include "common/model/geometry.h"

namespace kvferry {
namespace {

constexpr std::array<std::pair<std::string_view, Dtype>, 10> kDtypeNames{{
    {"bf16", Dtype::kBf16},
    {"fp16", Dtype::kFp16},
    {"fp8_e4m3", Dtype::kFp8E4m3},
    {"fp8_e5m2", Dtype::kFp8E5m2},
    {"fp32", Dtype::kFp32},
    {"int8", Dtype::kInt8},
    {"bfloat16", Dtype::kBf16},
    {"float16", Dtype::kFp16},
    {"half", Dtype::kFp16},
    {"float32", Dtype::kFp32},
}};

}  // namespace

std::string_view to_string(Dtype dtype) {
  for (const auto& [name, value] : kDtypeNames) {
    if (value == dtype) {
      return name;
    }
  }
  return "unknown";
}

Result<Dtype> parse_dtype(std::string_view text) {
  for (const auto& [name, value] : kDtypeNames) {
    if (name == text) {
      return value;
    }
  }
  return fail(Code::kInvalid,
              "dtype \"{}\" is unknown; use bf16, fp16, fp8_e4m3, fp8_e5m2, fp32 or int8 (\"auto\" must be "
              "resolved to one of them)",
              text.substr(0, 64));
}

std::uint32_t dtype_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
    case Dtype::kFp16:
      return 2;
    case Dtype::kFp8E4m3:
    case Dtype::kFp8E5m2:
    case Dtype::kInt8:
      return 1;
    case Dtype::kFp32:
      return 4;
  }
  return 0;
}

std::string_view to_string(AttentionKind kind) {
  return kind == AttentionKind::kMla ? "mla" : "mha";
}

Result<AttentionKind> parse_attention_kind(std::string_view text) {
  if (text == "mha") {
    return AttentionKind::kMha;
  }
  if (text == "mla") {
    return AttentionKind::kMla;
  }
  return fail(Code::kInvalid, "attention \"{}\" is unknown; use mha or mla", text.substr(0, 64));
}

std::string_view to_string(BufferKind kind) {
  switch (kind) {
    case BufferKind::kKey:
      return "key";
    case BufferKind::kValue:
      return "value";
    case BufferKind::kLatent:
      return "latent";
    case BufferKind::kIndexKey:
      return "index_key";
    case BufferKind::kIndexScale:
      return "index_scale";
    case BufferKind::kConv:
      return "conv";
    case BufferKind::kRecurrent:
      return "recurrent";
  }
  return "unknown";
}

Result<BufferKind> parse_buffer_kind(std::string_view text) {
  for (std::uint32_t kind = 0; kind < kBufferKinds; ++kind) {
    if (to_string(static_cast<BufferKind>(kind)) == text) {
      return static_cast<BufferKind>(kind);
    }
  }
  return fail(
      Code::kInvalid,
      "buffer kind \"{}\" is unknown; use key, value, latent, index_key, index_scale, conv or recurrent",
      text.substr(0, 64));
}

std::string_view to_string(RowSpace space) {
  switch (space) {
    case RowSpace::kTokens:
      return "tokens";
    case RowSpace::kDraft:
      return "draft";
    case RowSpace::kWindow:
      return "window";
    case RowSpace::kState:
      return "state";
  }
  return "unknown";
}

}  // namespace kvferry
