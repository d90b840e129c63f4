#include "transport/ucx/process_setup.h"

#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>

#include <mutex>

namespace kvferry::ucx {

void prepare_process() {
  static std::once_flag once;
  std::call_once(once, [] {
    const unsigned none = 1u << UCS_HANDLE_ERROR_NONE;
    if (ucs_global_opts.handle_errors == 0 || (ucs_global_opts.handle_errors & none) != 0) {
      return;
    }
    for (unsigned i = 0; i < ucs_global_opts.error_signals.count; ++i) {
      ucs_debug_disable_signal(ucs_global_opts.error_signals.signals[i]);
    }
  });
}

}  // namespace kvferry::ucx
