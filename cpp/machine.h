// SPDX-License-Identifier: Apache-2.0
// What this machine has to give.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace lowtide {

// Whether the kernel gives huge pages, and they are not turned off by the variable
// by which c10 asks for them.
inline bool huge_pages_wanted() {
  const char* text = std::getenv("THP_MEM_ALLOC_ENABLE");
  if (text && *text == '0') {
    return false;
  }
  char state[64] = "";
  if (FILE* const file = std::fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r")) {
    const std::size_t read = std::fread(state, 1, sizeof(state) - 1, file);
    state[read] = 0;
    std::fclose(file);
  }
  return state[0] != 0 && !std::strstr(state, "[never]");
}

inline std::size_t memory_of_machine() {
  static const std::size_t bytes =
      static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return bytes;
}

}  // namespace lowtide
