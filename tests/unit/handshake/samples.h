#pragma once
// Descriptors for the tests: a pair that fits for any model and two topologies, random ones, and comparison.

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "common/handshake/descriptor.h"
#include "common/handshake/rules.h"

namespace kvferry::samples {

ModelGeometry mha_model();  // 4 layers, 8 KV heads of 128, bf16
ModelGeometry mla_model();  // 4 layers, latent 512 + rope 64, fp8

/// "tp=4,pp=2,dcp=2"
Topology layout(std::string_view text);

/// A complete daemon with all ranks of its side attached.
Descriptor daemon(Role role, const ModelGeometry& model, const Topology& topology,
                  std::uint32_t page_size = 64);

struct Pair {
  Descriptor prefill;
  Descriptor decode;
};
Pair pair(const ModelGeometry& model, const Topology& prefill, const Topology& decode);

/// The pool entries of every rank made anew from the daemon's geometry and topology.
void attach_all(Descriptor& side);

/// Well formed with random values in every field; not meant to fit anything.
Descriptor random_descriptor(std::mt19937_64& random);

bool same(const Descriptor& a, const Descriptor& b);

std::vector<std::string> rules_of(const std::vector<Violation>& violations);
const Violation& find(const std::vector<Violation>& violations, const std::string& rule);

/// One to three random edits: a byte replaced, removed, inserted, or a piece repeated.
std::string mutate(std::string text, std::mt19937_64& random);

/// For property tests: printed by the caller; KVF_SEED replaces it.
std::uint64_t seed();

}  // namespace kvferry::samples
