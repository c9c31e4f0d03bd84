#include "file_memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace elbowroom {

namespace {

constexpr size_t LEAST_IN_FILE = 1 << 12;

thread_local std::string file_folder;

struct FileMapping {
  void* address;
  size_t nbytes;
};

void unmap_file(void* context) {
  auto* mapping = static_cast<FileMapping*>(context);
  munmap(mapping->address, mapping->nbytes);
  delete mapping;
}

// Returns 0, or what went wrong.
int map_file(size_t nbytes, void** address) {
  std::string name = file_folder + "/elbowroom-XXXXXX";
  const int file = mkostemp(name.data(), O_CLOEXEC);
  if (file < 0) return errno;
  unlink(name.c_str());
  // Without the blocks of a full disk, a later access would end the process.
  int error = posix_fallocate(file, 0, static_cast<off_t>(nbytes));
  if (error == 0) {
    *address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (*address == MAP_FAILED) error = errno;
  }
  close(file);
  return error;
}

}  // namespace

bool is_in_file(size_t nbytes) { return nbytes >= LEAST_IN_FILE && !file_folder.empty(); }

c10::DataPtr allocate_in_file(size_t nbytes) {
  void* address = nullptr;
  const int error = map_file(nbytes, &address);
  TORCH_CHECK(error == 0, "no room for ", nbytes, " bytes in ", file_folder, ": ", std::strerror(error));
  return {address, new FileMapping{address, nbytes}, &unmap_file, c10::Device(c10::DeviceType::CPU)};
}

std::string set_file_folder(std::string next) { return std::exchange(file_folder, std::move(next)); }

}  // namespace elbowroom
