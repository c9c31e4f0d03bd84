#include "file_runs.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

namespace elbowroom {

namespace {

constexpr int64_t BLOCK_BYTES = int64_t{1} << 18;
// A system call takes about as long as moving so many bytes.
constexpr int64_t CALL_BYTES = int64_t{1} << 12;

template <typename Move>
void move_whole(int64_t nbytes, const Move& move) {
  for (int64_t done = 0; done < nbytes;) {
    const ssize_t moved = move(done, static_cast<size_t>(nbytes - done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) throw std::system_error(errno, std::generic_category());
    if (moved == 0) throw std::system_error(EIO, std::generic_category());  // the file is shorter than what was written
    done += moved;
  }
}

void read_whole(int file, int64_t offset, char* memory, int64_t nbytes) {
  move_whole(nbytes, [&](int64_t done, size_t left) { return pread(file, memory + done, left, offset + done); });
}

void write_whole(int file, int64_t offset, const char* memory, int64_t nbytes) {
  move_whole(nbytes, [&](int64_t done, size_t left) { return pwrite(file, memory + done, left, offset + done); });
}

// Calls `move_line` with the offset and the memory of each innermost dimension.
template <typename Memory, typename MoveLine>
void move_dimensions(
    int64_t offset, Memory* memory, const std::vector<RunDimension>& dimensions, size_t first, const MoveLine& move_line) {
  if (first + 1 >= dimensions.size()) return move_line(offset, memory);
  const RunDimension& outer = dimensions[first];
  for (int64_t i = 0; i < outer.count; ++i) {
    move_dimensions(offset + i * outer.file_stride, memory + i * outer.memory_stride, dimensions, first + 1, move_line);
  }
}

// Calls `move_block` with the first of the runs that fit into a block together, their number, and the bytes between the
// beginning of the first and the end of the last.
template <typename MoveBlock>
void move_blocks(const RunDimension& line, int64_t run_bytes, const MoveBlock& move_block) {
  const int64_t most = std::max<int64_t>(1, (BLOCK_BYTES - run_bytes) / line.file_stride + 1);
  for (int64_t begin = 0; begin < line.count; begin += most) {
    const int64_t count = std::min(most, line.count - begin);
    move_block(begin, count, (count - 1) * line.file_stride + run_bytes);
  }
}

RunDimension find_innermost(const std::vector<RunDimension>& dimensions) {
  return dimensions.empty() ? RunDimension{1, 1, 1} : dimensions.back();
}

}  // namespace

void read_runs(int file, int64_t offset, char* memory, int64_t run_bytes, const std::vector<RunDimension>& dimensions) {
  const RunDimension line = find_innermost(dimensions);
  const bool is_close = line.count > 1 && line.file_stride - run_bytes <= CALL_BYTES && run_bytes < BLOCK_BYTES;
  const std::unique_ptr<char[]> block(is_close ? new char[BLOCK_BYTES] : nullptr);  // NOLINT
  move_dimensions(offset, memory, dimensions, 0, [&](int64_t from, char* to) {
    if (!is_close) {
      for (int64_t i = 0; i < line.count; ++i) {
        read_whole(file, from + i * line.file_stride, to + i * line.memory_stride, run_bytes);
      }
      return;
    }
    move_blocks(line, run_bytes, [&](int64_t begin, int64_t count, int64_t nbytes) {
      read_whole(file, from + begin * line.file_stride, block.get(), nbytes);
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(to + (begin + i) * line.memory_stride, block.get() + i * line.file_stride, static_cast<size_t>(run_bytes));
      }
    });
  });
}

void write_runs(
    int file, int64_t offset, const char* memory, int64_t run_bytes, const std::vector<RunDimension>& dimensions) {
  const RunDimension line = find_innermost(dimensions);
  // Blocks are read as well.
  const bool is_close = line.count > 1 && 2 * line.file_stride - run_bytes <= CALL_BYTES && run_bytes < BLOCK_BYTES;
  const std::unique_ptr<char[]> block(is_close ? new char[BLOCK_BYTES] : nullptr);  // NOLINT
  move_dimensions(offset, memory, dimensions, 0, [&](int64_t to, const char* from) {
    if (!is_close) {
      for (int64_t i = 0; i < line.count; ++i) {
        write_whole(file, to + i * line.file_stride, from + i * line.memory_stride, run_bytes);
      }
      return;
    }
    move_blocks(line, run_bytes, [&](int64_t begin, int64_t count, int64_t nbytes) {
      const int64_t where = to + begin * line.file_stride;
      if (line.file_stride > run_bytes) read_whole(file, where, block.get(), nbytes);
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(block.get() + i * line.file_stride, from + (begin + i) * line.memory_stride, static_cast<size_t>(run_bytes));
      }
      write_whole(file, where, block.get(), nbytes);
    });
  });
}

}  // namespace elbowroom
