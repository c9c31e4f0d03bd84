// Moves runs of bytes between a file and memory.
#pragma once

#include <cstdint>
#include <vector>

namespace elbowroom {

// Runs at equal distances: so many, with these bytes from the beginning of one to that of the next.
struct RunDimension {
  int64_t count, file_stride, memory_stride;
};

// Reads or writes runs of `run_bytes`, the outermost dimension first. Runs that lie close together are moved in blocks: to
// write them, what lies between is read before and written back, so that nobody else may write there meanwhile.
// Throws std::system_error.
void read_runs(int file, int64_t offset, char* memory, int64_t run_bytes, const std::vector<RunDimension>& dimensions);
void write_runs(int file, int64_t offset, const char* memory, int64_t run_bytes, const std::vector<RunDimension>& dimensions);

}  // namespace elbowroom
