// For what can be done only once in a process: a case that is skipped, and another that runs it in a process of its
// own.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

extern char** environ;

namespace cumem::testing {

// Runs one skipped case of this program in a process of its own. Whether it ran there and ended well; else prints why.
inline bool passes_in_a_process_of_its_own(const std::string& test_case) {
  std::vector<std::string> words{"cumem_tests", "--test-case=" + test_case, "--no-skip", "--no-intro"};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  pid_t child = 0;
  REQUIRE(posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments.data(), environ) == 0);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string output;
  char buffer[4096];
  for (ssize_t got = ::read(ends[0], buffer, sizeof buffer); got > 0; got = ::read(ends[0], buffer, sizeof buffer)) {
    output.append(buffer, static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  const std::string count = "test cases:";
  const auto at = output.find(count);
  const bool one_ran = at != std::string::npos && std::stoi(output.substr(at + count.size())) == 1;
  if (one_ran && WIFEXITED(status) && WEXITSTATUS(status) == 0) return true;
  MESSAGE(output);
  return false;
}

}  // namespace cumem::testing
