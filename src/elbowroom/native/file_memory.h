// Memory of a thread's large tensors in temporary files, which the system can write out: it does not count as the room's.
#pragma once

#include <c10/core/Allocator.h>

#include <string>

namespace elbowroom {

// Whether this thread's block of so many bytes belongs into a file.
bool is_in_file(size_t nbytes);

// Maps a new file without a name. Throws if the disk has no room for it.
c10::DataPtr allocate_in_file(size_t nbytes);

// Puts this thread's large blocks into files of a folder; an empty one ends that. Returns the former folder.
std::string set_file_folder(std::string folder);

}  // namespace elbowroom
