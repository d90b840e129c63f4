#include "common/daemon/command_line.h"
#include "decode/daemon.h"

int main(int argc, char** argv) {
  auto command = kvferry::read_command_line(kvferry::Role::kDecode, argc, argv);
  if (!command.config) {
    return command.exit_code;
  }
  kvferry::log::set_level(command.config->log_level);
  return kvferry::decode::Daemon(*std::move(command.config)).run();
}
