#include "tools/cli/demo/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <utility>

namespace kvferry {
namespace {

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Result<Pipe> make_pipe() {
  std::array<int, 2> fds{};
  if (::pipe2(fds.data(), O_CLOEXEC) != 0) {
    return fail(errno_error("pipe2", errno));
  }
  return Pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Runs in the child between fork and exec: only calls that are safe there.
[[noreturn]] void become(char* const* arguments, int in, int out, int log, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) {
    ::_exit(127);
  }
  ::setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  std::signal(SIGPIPE, SIG_DFL);
  if (::dup2(in, STDIN_FILENO) < 0 || ::dup2(out, STDOUT_FILENO) < 0 || ::dup2(log, STDERR_FILENO) < 0) {
    ::_exit(127);
  }
  ::execv(arguments[0], arguments);
  ::_exit(127);
}

}  // namespace

Result<ChildProcess> ChildProcess::spawn(const Options& options) {
  ChildProcess child(options);
  KVF_TRY(Pipe in, make_pipe());
  KVF_TRY(Pipe out, make_pipe());
  UniqueFd log(::open(options.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (!log) {
    return fail(errno_error("open " + options.log, errno));
  }
  if (::access(options.program.c_str(), X_OK) != 0) {
    return fail(errno_error("start " + options.program, errno));
  }
  std::vector<std::string> texts{options.program};
  texts.insert(texts.end(), options.arguments.begin(), options.arguments.end());
  std::vector<char*> arguments;
  arguments.reserve(texts.size() + 1);
  for (std::string& text : texts) {
    arguments.push_back(text.data());
  }
  arguments.push_back(nullptr);
  const pid_t parent = ::getpid();
  child.pid_ = ::fork();
  if (child.pid_ == 0) {
    become(arguments.data(), in.read.get(), out.write.get(), log.get(), parent);
  }
  if (child.pid_ < 0) {
    return fail(errno_error("fork", errno));
  }
  child.pid_fd_ = static_cast<int>(::syscall(SYS_pidfd_open, child.pid_, 0));
  child.stdin_ = std::move(in.write);
  child.stdout_ = std::move(out.read);
  ::fcntl(child.stdout_.get(), F_SETFL, O_NONBLOCK);
  return child;
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0 && !wait_status_) {
    signal(SIGKILL);
    reap(true);
  }
  if (pid_fd_ >= 0) {
    ::close(pid_fd_);
  }
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : options_(std::move(other.options_)),
      pid_(std::exchange(other.pid_, -1)),
      pid_fd_(std::exchange(other.pid_fd_, -1)),
      stdin_(std::move(other.stdin_)),
      stdout_(std::move(other.stdout_)),
      lines_(std::move(other.lines_)),
      at_end_(other.at_end_),
      wait_status_(other.wait_status_) {}

Result<std::vector<std::string>> ChildProcess::read_lines() {
  std::vector<std::string> lines;
  while (!at_end_) {
    std::array<char, 65536> bytes{};
    const ssize_t count = ::read(stdout_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0 && errno == EAGAIN) {
      break;
    }
    at_end_ = count <= 0;
    if (count > 0) {
      KVF_TRY(auto more, lines_.add({bytes.data(), static_cast<std::size_t>(count)}));
      std::move(more.begin(), more.end(), std::back_inserter(lines));
    }
  }
  return lines;
}

void ChildProcess::signal(int number) const {
  if (pid_ > 0 && !wait_status_) {
    ::kill(pid_, number);
  }
}

bool ChildProcess::wait(std::chrono::milliseconds limit) {
  reap(false);
  if (!wait_status_ && pid_fd_ >= 0) {
    pollfd fd{pid_fd_, POLLIN, 0};
    ::poll(&fd, 1, static_cast<int>(limit.count()));
    reap(false);
  }
  return wait_status_.has_value();
}

std::string ChildProcess::status() {
  reap(false);
  if (!wait_status_) {
    return {};
  }
  return WIFSIGNALED(*wait_status_) ? fmt::format("signal {}", WTERMSIG(*wait_status_))
                                    : fmt::format("exit status {}", WEXITSTATUS(*wait_status_));
}

void ChildProcess::reap(bool block) {
  int status = 0;
  if (pid_ > 0 && !wait_status_ && ::waitpid(pid_, &status, block ? 0 : WNOHANG) == pid_) {
    wait_status_ = status;
  }
}

std::string ChildProcess::log_tail() const {
  constexpr std::streamoff kTail = 2000;
  std::ifstream file(options_.log, std::ios::binary | std::ios::ate);
  const std::streamoff size = file ? static_cast<std::streamoff>(file.tellg()) : 0;
  file.seekg(size > kTail ? size - kTail : 0);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace kvferry
