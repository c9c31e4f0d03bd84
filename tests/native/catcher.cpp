// Calls a function of the arena's library as PyTorch's C++ does, and says what it raises.

#include <cstdint>
#include <cstring>
#include <exception>
#include <typeinfo>

extern "C" int catch_alloc(void *(*alloc)(int64_t, int, void *), int64_t nbytes, char *type, char *text, int most)
{
    try {
        return alloc(nbytes, 0, nullptr) == nullptr ? 0 : 1;
    } catch (const std::exception &error) {
        std::strncpy(type, typeid(error).name(), most - 1);
        std::strncpy(text, error.what(), most - 1);
        return 2;
    }
}

extern "C" int catch_pool(void (*refuse)(int), char *text, int most)
{
    try {
        refuse(0);
        return 0;
    } catch (const std::exception &error) {
        std::strncpy(text, error.what(), most - 1);
        return 2;
    }
}
