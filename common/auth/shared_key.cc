#include "common/auth/shared_key.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/base/check.h"
#include "common/base/unique_fd.h"

namespace kvferry {
namespace {

constexpr std::size_t kSecretBytesMin = 32;
constexpr std::size_t kSecretBytesMax = 4096;

void add_part(std::string& message, std::string_view part) {
  for (unsigned shift = 0; shift < 64; shift += 8) {
    message.push_back(static_cast<char>(part.size() >> shift & 0xFF));
  }
  message += part;
}

}  // namespace

SharedKey::SharedKey(std::span<const std::byte> secret) : secret_(secret.begin(), secret.end()) {}

SharedKey::~SharedKey() {
  OPENSSL_cleanse(secret_.data(), secret_.size());
}

Result<std::shared_ptr<const SharedKey>> SharedKey::load(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0) {
    return fail(Code::kInvalid, "'{}' cannot be read: {}", path, std::strerror(errno));
  }
  if ((info.st_mode & S_IROTH) != 0 || (info.st_mode & S_IWOTH) != 0) {
    return fail(Code::kInvalid, "'{}' has mode {:04o}: anybody on this host can use the key; chmod o-rwx it",
                path, info.st_mode & 07777u);
  }
  std::vector<std::byte> bytes(kSecretBytesMax + 2);
  std::size_t used = 0;
  for (ssize_t got = 1; got > 0 && used < bytes.size(); used += static_cast<std::size_t>(got)) {
    got = ::read(fd.get(), bytes.data() + used, bytes.size() - used);
    if (got < 0) {
      return fail(Code::kInvalid, "'{}' cannot be read: {}", path, std::strerror(errno));
    }
  }
  while (used > 0 && (bytes[used - 1] == std::byte{'\n'} || bytes[used - 1] == std::byte{'\r'})) {
    --used;
  }
  if (used < kSecretBytesMin || used > kSecretBytesMax) {
    OPENSSL_cleanse(bytes.data(), bytes.size());
    return fail(Code::kInvalid,
                "'{}' holds {} bytes, a key has {} to {}; make one with: head -c 32 /dev/urandom | base64",
                path, used, kSecretBytesMin, kSecretBytesMax);
  }
  auto key = std::make_shared<const SharedKey>(std::span<const std::byte>(bytes.data(), used));
  OPENSSL_cleanse(bytes.data(), bytes.size());
  return key;
}

Mac SharedKey::mac(std::string_view purpose, std::initializer_list<std::string_view> parts) const {
  std::string message;
  add_part(message, purpose);
  for (const std::string_view part : parts) {
    add_part(message, part);
  }
  Mac out{};
  unsigned size = 0;
  const auto* made = ::HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
                            reinterpret_cast<const unsigned char*>(message.data()), message.size(),
                            reinterpret_cast<unsigned char*>(out.data()), &size);
  KVF_CHECK(made != nullptr && size == out.size());
  return out;
}

std::shared_ptr<const SharedKey> SharedKey::derive(std::string_view purpose,
                                                   std::initializer_list<std::string_view> parts) const {
  const Mac secret = mac(purpose, parts);
  return std::make_shared<const SharedKey>(secret);
}

bool same_mac(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace kvferry
