// A Hugging Face config.json: what is accepted passes the model's own validation, and its sizes make sense.

#include "common/model/geometry.h"
#include "tests/fuzz/fuzz.h"

namespace kvferry::fuzz {

// Real ones, cut down to what matters, lie in corpus/hf_config.
std::vector<std::string> seeds() {
  return {
      R"({"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,)"
      R"( "num_key_value_heads": 8, "torch_dtype": "bfloat16"})"};
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const auto model = geometry_from_hf_config(fuzz::text_of(data, size));
  if (!model) {
    fuzz::check_reason(model.error());
    return 0;
  }
  KVF_CHECK(validate(*model).has_value());
  KVF_CHECK(!model->kv_layers.empty() || !model->sliding_layers.empty() || !model->state_layers.empty());
  KVF_CHECK(model->cached_layers().empty() || model->bytes_per_token() > 0);
  for (const BufferId& id : model->pool_buffers(true)) {
    KVF_CHECK(model->has_buffer(id));
    KVF_CHECK(is_state(id.kind) || model->head_bytes(id.kind) > 0);
  }
  return 0;
}
