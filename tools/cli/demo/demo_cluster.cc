#include "tools/cli/demo/demo_cluster.h"

#include <poll.h>
#include <sys/signalfd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>

#include "common/base/random.h"
#include "common/handshake/descriptor_json.h"

namespace kvferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kReadyLimit{30};
constexpr seconds kStopLimit{15};

// Ctrl-C and SIGTERM become readable on a descriptor, so that the children are always ended in order.
Result<UniqueFd> catch_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGHUP);
  std::signal(SIGPIPE, SIG_IGN);
  if (::sigprocmask(SIG_BLOCK, &set, nullptr) != 0) {
    return fail(errno_error("sigprocmask", errno));
  }
  UniqueFd fd(::signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
  if (!fd) {
    return fail(errno_error("signalfd", errno));
  }
  return fd;
}

Result<std::filesystem::path> private_directory() {
  std::error_code error;
  std::string path = (std::filesystem::temp_directory_path(error) / "kvferry-demo-XXXXXX").string();
  if (error || ::mkdtemp(path.data()) == nullptr) {
    return fail(
        errno_error("a private directory for the demo (" + path + ")", error ? error.value() : errno));
  }
  return std::filesystem::path(path);
}

Result<std::string> find_program(const std::filesystem::path& directory, const std::string& folder,
                                 const std::string& name) {
  for (const auto& path : {directory / name, directory / ".." / folder / name}) {
    std::error_code error;
    if (std::filesystem::is_regular_file(path, error)) {
      return std::filesystem::canonical(path, error).string();
    }
  }
  return fail(Code::kNotFound, "{} is neither beside kvferry in {} nor in ../{}; build it (tools/demo does)",
              name, directory.string(), folder);
}

Result<void> write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) {
    return fail(Code::kIo, "cannot write {}", path.string());
  }
  return {};
}

/// A key that both daemons share, for this run.
Result<void> write_key(const std::filesystem::path& path) {
  std::ofstream file(path);
  std::error_code error;
  std::filesystem::permissions(path, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write,
                               error);
  for (int i = 0; i < 4; ++i) {
    file << fmt::format("{:016x}", random_u64());
  }
  file.close();
  if (!file || error) {
    return fail(Code::kIo, "cannot write {}", path.string());
  }
  return {};
}

}  // namespace

DemoCluster::DemoCluster(const DemoOptions& options, const DemoLayout& layout, const PoolSizes& pools,
                         std::filesystem::path program_directory)
    : options_(options), layout_(layout), pools_(pools), program_directory_(std::move(program_directory)) {}

Result<std::unique_ptr<DemoCluster>> DemoCluster::create(const DemoOptions& options, const DemoLayout& layout,
                                                         const PoolSizes& pools,
                                                         const std::filesystem::path& program_directory) {
  std::unique_ptr<DemoCluster> cluster(new DemoCluster(options, layout, pools, program_directory));
  KVF_TRY(cluster->signals_, catch_signals());
  KVF_TRY(cluster->directory_, private_directory());
  KVF_TRY_VOID(write_key(cluster->directory_ / "key"));
  if (!options.model_text.empty()) {
    KVF_TRY_VOID(write_text(cluster->model(), options.model_text));
  }
  return cluster;
}

DemoCluster::~DemoCluster() {
  engines_ = {};
  daemons_ = {};
  if (!options_.keep && !directory_.empty()) {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
}

Result<void> DemoCluster::write_config(Side side) const {
  const std::string name(side_name(side));
  nlohmann::json config{{"instance", "demo-" + name},
                        {"model", model()},
                        {"page_size", layout_.page_size(side)},
                        {"draft_layers", options_.draft_layers},
                        {"topology", topology_to_json(layout_.topology(side))},
                        {"engine_socket", {{"path", engine_socket(side)}}},
                        {"metrics", {{"listen", options_.host + ":0"}}}};
  if (options_.auth) {
    config["auth"] = {{"key_file", (directory_ / "key").string()}};
  }
  if (!options_.dtype.empty()) {
    config["dtype"] = options_.dtype;
  }
  const bool ucx = options_.fabric == "ucx" || options_.fabric == "ucx-tcp";
  config["fabrics"] = {ucx ? "ucx" : options_.fabric};
  if (ucx) {
    config["ucx"] = {{"transports", options_.fabric == "ucx" ? "shm" : "tcp"}, {"device", "lo"}};
  }
  if (side == Side::kPrefill) {
    if (options_.copy_threads > 0) {
      config["shm"] = {{"copy_threads", options_.copy_threads}};
    }
    config["bootstrap"] = {{"listen", bootstrap_.empty() ? options_.host + ":0" : bootstrap_}};
  } else {
    if (!options_.verify.empty()) {
      config["verify"] = {{"mode", options_.verify}};
    }
    config["shm"] = {{"socket", (directory_ / "decode-shm.sock").string()}};
    config["tcp"] = {{"listen", options_.host + ":0"}};
  }
  return write_text(directory_ / (name + ".json"), config.dump(2) + '\n');
}

std::string DemoCluster::model() const {
  return options_.model_text.empty() ? options_.model : (directory_ / "config.json").string();
}

Result<void> DemoCluster::start() {
  KVF_TRY_VOID(start_daemons());
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    KVF_TRY_VOID(start_engine(side));
  }
  return {};
}

Result<void> DemoCluster::start_daemons() {
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    KVF_TRY_VOID(start_daemon(side));
  }
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    KVF_TRY_VOID(await_ready(side));
  }
  return {};
}

Result<void> DemoCluster::check_daemons() {
  KVF_TRY_VOID(check_interrupt());
  for (auto& daemon : daemons_) {
    KVF_TRY(const auto ignored, daemon->read_lines());
    KVF_TRY_VOID(check_alive(*daemon));
  }
  return {};
}

Result<void> DemoCluster::start_daemon(Side side) {
  KVF_TRY_VOID(write_config(side));
  const std::string folder(side_name(side));
  const std::string name = "kvferry-" + folder;
  KVF_TRY(const std::string program, find_program(program_directory_, folder, name));
  KVF_TRY(ChildProcess child,
          ChildProcess::spawn(
              {name, program, {"--config", (directory_ / (folder + ".json")).string()}, log_path(name)}));
  child.close_stdin();
  daemons_[index(side)] = std::make_unique<ChildProcess>(std::move(child));
  return {};
}

Result<void> DemoCluster::await_ready(Side side) {
  ChildProcess& child = *daemons_[index(side)];
  const auto deadline = std::chrono::steady_clock::now() + kReadyLimit;
  while (std::chrono::steady_clock::now() < deadline) {
    pollfd fds[] = {{child.stdout_fd(), POLLIN, 0}, {signals_.get(), POLLIN, 0}};
    ::poll(fds, 2, 100);
    KVF_TRY_VOID(check_interrupt());
    KVF_TRY(const auto lines, child.read_lines());
    for (const std::string& line : lines) {
      KVF_TRY(const auto ready, parse_line(line));
      if (read_flag(ready, "ready")) {
        KVF_TRY(metrics_[index(side)], read_text(ready, "metrics"));
        if (side == Side::kPrefill) {
          KVF_TRY(bootstrap_, read_text(ready, "bootstrap"));
        }
        return {};
      }
    }
    if (child.at_end()) {
      child.wait(seconds(5));
      return fail(Code::kUnavailable, "{} ended ({}) before it was ready:\n{}", child.name(), child.status(),
                  child.log_tail());
    }
  }
  return fail(Code::kDeadline, "{} was not ready within {} s:\n{}", child.name(), kReadyLimit.count(),
              child.log_tail());
}

Result<void> DemoCluster::start_engine(Side side) {
  const std::string role(side_name(side));
  KVF_TRY(const std::string program, find_program(program_directory_, "tools", "kvferry-synthetic-engine"));
  std::vector<std::string> arguments{"--role",
                                     role,
                                     "--socket",
                                     engine_socket(side),
                                     "--model",
                                     model(),
                                     "--topology",
                                     to_string(layout_.topology(side)),
                                     "--page-size",
                                     std::to_string(layout_.page_size(side)),
                                     "--draft-layers",
                                     std::to_string(options_.draft_layers),
                                     "--rooms",
                                     std::to_string(layout_.rooms),
                                     "--pages",
                                     std::to_string(pools_.pages(side)),
                                     "--aux-slots",
                                     std::to_string(options_.concurrency + 8),
                                     "--seed",
                                     std::to_string(options_.seed),
                                     options_.dense ? "--dense" : "--scatter"};
  if (!options_.dtype.empty()) {
    arguments.insert(arguments.end(), {"--dtype", options_.dtype});
  }
  KVF_TRY(ChildProcess child,
          ChildProcess::spawn({role + " engine", program, arguments, log_path(role + "-engine")}));
  engines_[index(side)] = std::make_unique<ChildProcess>(std::move(child));
  return {};
}

bool DemoCluster::send(Side side, const nlohmann::json& command) {
  return engines_[index(side)]->send(command);
}

Result<std::vector<ClusterEvent>> DemoCluster::poll(milliseconds limit) {
  std::vector<pollfd> fds{{signals_.get(), POLLIN, 0}};
  for (const auto* group : {&engines_, &daemons_}) {
    for (const auto& child : *group) {
      if (child != nullptr && !child->at_end()) {
        fds.push_back({child->stdout_fd(), POLLIN, 0});
      }
    }
  }
  ::poll(fds.data(), fds.size(), static_cast<int>(limit.count()));
  KVF_TRY_VOID(check_interrupt());
  std::vector<ClusterEvent> events;
  for (const Side side : {Side::kPrefill, Side::kDecode}) {
    KVF_TRY_VOID(read_engine(side, events));
    if (auto& daemon = daemons_[index(side)]; daemon != nullptr) {
      KVF_TRY(const auto ignored, daemon->read_lines());
      KVF_TRY_VOID(check_alive(*daemon));
    }
  }
  return events;
}

Result<void> DemoCluster::read_engine(Side side, std::vector<ClusterEvent>& events) {
  ChildProcess& engine = *engines_[index(side)];
  KVF_TRY(const auto lines, engine.read_lines());
  for (const std::string& line : lines) {
    KVF_TRY(auto body, parse_line(line));
    if (body.value("event", "") == "refused") {
      return fail(Code::kMismatch, "the {} engine was refused: {}", side_name(side),
                  body.value("reason", ""));
    }
    events.push_back({side, std::move(body)});
  }
  return check_alive(engine);
}

Result<void> DemoCluster::check_alive(ChildProcess& child) const {
  if (!child.at_end()) {
    return {};
  }
  child.wait(seconds(5));
  return fail(Code::kUnavailable, "{} ended ({}):\n{}", child.name(),
              child.status().empty() ? "its stdout is closed" : child.status(), child.log_tail());
}

Result<void> DemoCluster::check_interrupt() {
  signalfd_siginfo info{};
  if (::read(signals_.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
    return fail(Code::kAborted, "interrupted by signal {}", info.ssi_signo);
  }
  return {};
}

void DemoCluster::kill_daemon(Side side) {
  daemons_[index(side)]->signal(SIGKILL);
  daemons_[index(side)]->wait(seconds(10));
  daemons_[index(side)].reset();
}

Result<void> DemoCluster::restart_daemon(Side side) {
  KVF_TRY_VOID(start_daemon(side));
  return await_ready(side);
}

Result<void> DemoCluster::stop() {
  std::string problems;
  const auto end = [&](std::unique_ptr<ChildProcess>& child) {
    if (child == nullptr) {
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + kStopLimit;
    while (!child->at_end() && std::chrono::steady_clock::now() < deadline) {
      pollfd fd{child->stdout_fd(), POLLIN, 0};
      ::poll(&fd, 1, 100);
      if (!child->read_lines()) {
        break;
      }
    }
    if (!child->wait(seconds(2))) {
      problems += fmt::format("{} did not end within {} s. ", child->name(), kStopLimit.count());
    } else if (!child->exited_well()) {
      problems += fmt::format("{} ended with {}:\n{}", child->name(), child->status(), child->log_tail());
    }
    child.reset();
  };
  for (auto& engine : engines_) {
    if (engine != nullptr) {
      engine->send({{"op", "quit"}});
    }
  }
  std::for_each(engines_.begin(), engines_.end(), end);
  for (auto& daemon : daemons_) {
    if (daemon != nullptr) {
      daemon->signal(SIGTERM);
    }
  }
  std::for_each(daemons_.begin(), daemons_.end(), end);
  if (!problems.empty()) {
    return fail(Code::kUnavailable, "{}", problems);
  }
  return {};
}

std::vector<std::string> DemoCluster::daemon_names(Side side) const {
  std::vector<std::string> names{fmt::format("demo-{}", side_name(side))};
  if (side == Side::kPrefill) {
    names.push_back(bootstrap_);
  }
  return names;
}

void DemoCluster::wait_for_interrupt() {
  pollfd fd{signals_.get(), POLLIN, 0};
  while (::poll(&fd, 1, -1) < 0 && errno == EINTR) {
  }
}

}  // namespace kvferry
