#pragma once

namespace kvferry::ucx {

/// Takes UCX's crash handlers out of this process, once. UCX installs them when its library is loaded, before
/// any code of ours could ask it not to; they would print a backtrace and hide a crash from systemd and
/// sanitizers.
void prepare_process();

}  // namespace kvferry::ucx
