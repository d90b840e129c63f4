#pragma once
// Which host this is, as far as shared memory is concerned.

#include <string>

namespace kvferry {

/// Equal in two processes exactly when they run under one booted kernel; empty when it cannot be read. It
/// tells hosts apart and proves nothing: a peer can claim any.
std::string boot_id();

}  // namespace kvferry
