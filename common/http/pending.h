#pragma once
// The handle of something that was asked for and will report through a callback: an HTTP fetch, a channel
// being connected. It may be dropped at once (the work goes on) and may outlive the io_context. Thread: the
// io_context's.

#include <memory>
#include <utility>

namespace kvferry {

/// What a handle acts on. Implemented by the operations themselves.
class PendingOperation {
 public:
  virtual ~PendingOperation() = default;
  /// Ends the operation now; `report`: the callback still gets kAborted, from the io_context.
  virtual void give_up(bool report) = 0;
};

class Pending {
 public:
  explicit Pending(std::weak_ptr<PendingOperation> operation) : operation_(std::move(operation)) {}

  /// The callback gets kAborted, later and once, unless it has already been called.
  void cancel() { give_up(true); }
  /// The callback is destroyed and never called: for owners that go away.
  void abandon() { give_up(false); }

 private:
  void give_up(bool report) {
    if (const auto operation = operation_.lock()) {
      operation->give_up(report);
    }
  }

  std::weak_ptr<PendingOperation> operation_;
};

}  // namespace kvferry
