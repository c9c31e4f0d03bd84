/* The functions that PyTorch calls, for the one memory of the process. */

#define _GNU_SOURCE
#include "parts.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static struct memory *installed;

static void lock(void)
{
    pthread_mutex_lock(&installed->lock);
}

static void unlock(void)
{
    pthread_mutex_unlock(&installed->lock);
}

/* Once, for good: PyTorch keeps blocks until the process ends. A process that forks in the middle of a request of another
   thread must not leave its child with a lock that nobody opens. 0, or -1 if there is one already. */
EXPORTED int memory_install(struct memory *memory)
{
    if (installed != NULL)
        return -1;
    installed = memory;
    return pthread_atfork(lock, unlock, unlock);
}

/* Errors ---------------------------------------------------------------------------------------------------------- */

/* PyTorch takes a NULL for an address, so out of memory has to be an exception of its C++ library. No header of C
   declares how those are made; the layouts below are those of the ABI that all compilers on Linux share (Itanium C++ ABI,
   libstdc++'s std::string), and what is called is looked up by name. */

#define STRING "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#define EXCEPTION_BYTES 1024 /* more than any of PyTorch's takes */

struct string {
    char *text;
    size_t length;
    union {
        char here[16];
        size_t room;
    } short_text;
};

struct source_location {
    const char *function, *file;
    uint32_t line;
};

typedef void (*function)(void);

static function find(void *library, const char *name)
{
    function found = NULL;
    if (library != NULL)
        *(void **)&found = dlsym(library, name);
    return found;
}

/* The first function in the table of an object is its destructor. */
static void destroy(void *object)
{
    void (***table)(void *) = object;
    (*table)[0](object);
}

/* Raises torch.OutOfMemoryError; comes back if this PyTorch has no such thing. */
static void raise_out_of_memory(void *torch, void *standard, const char *text)
{
    void *(*allocate)(size_t) = (void *(*)(size_t))find(standard, "__cxa_allocate_exception");
    void (*throw_it)(void *, void *, void (*)(void *)) =
        (void (*)(void *, void *, void (*)(void *)))find(standard, "__cxa_throw");
    void *(*new)(size_t) = (void *(*)(size_t))find(standard, "_Znwm");
    void (*delete)(void *) = (void (*)(void *))find(standard, "_ZdlPv");
    typedef void (*constructor)(void *, struct source_location, struct string *);
    constructor construct = (constructor)find(torch, "_ZN3c1016OutOfMemoryErrorC1ENS_14SourceLocationE" STRING);
    if (construct == NULL) /* until it had one of its own, it was made like any other error */
        construct = (constructor)find(torch, "_ZN3c105ErrorC1ENS_14SourceLocationE" STRING);
    void *type = torch == NULL ? NULL : dlsym(torch, "_ZTIN3c1016OutOfMemoryErrorE");
    void *python = type != NULL ? NULL : dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
    if (python != NULL)
        type = dlsym(python, "_ZTIN3c1016OutOfMemoryErrorE");
    if (allocate == NULL || throw_it == NULL || new == NULL || delete == NULL || construct == NULL || type == NULL)
        return;
    void *exception = allocate(EXCEPTION_BYTES);
    memset(exception, 0, EXCEPTION_BYTES);
    size_t length = strlen(text);
    struct string message = {.text = new(length + 1), .length = length, .short_text.room = length};
    memcpy(message.text, text, length + 1);
    construct(exception, (struct source_location){"memory_take", "elbowroom/arena", 0}, &message);
    if (message.text != message.short_text.here)
        delete(message.text);
    throw_it(exception, type, destroy);
}

/* Raises RuntimeError; comes back if there is no PyTorch. */
static void raise_error(void *torch, const char *text)
{
    void (*fail)(const char *, const char *, uint32_t, const char *) =
        (void (*)(const char *, const char *, uint32_t, const char *))find(
            torch, "_ZN3c106detail14torchCheckFailEPKcS2_jS2_");
    if (fail != NULL)
        fail("memory_take", "elbowroom/arena", 0, text);
}

static void *open_loaded(const char *library)
{
    return dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
}

static void refuse(int64_t nbytes, int device)
{
    struct counts counts;
    memory_count(installed, device, &counts);
    char text[512];
    snprintf(text, sizeof text,
             "CUDA out of memory. Tried to allocate %" PRId64 " bytes on device %d, which has no room for them: %" PRId64
             " bytes are allocated, and %" PRId64 " bytes reserved, %" PRId64
             " of them for the arena of Elbowroom. Make the batch or the memory budget smaller.",
             nbytes, device, counts.allocated_bytes, counts.reserved_bytes, counts.arena_bytes);
    void *torch = open_loaded("libc10.so");
    raise_out_of_memory(torch, open_loaded("libstdc++.so.6"), text);
    raise_error(torch, text);
}

/* What is plugged in ----------------------------------------------------------------------------------------------- */

EXPORTED void *elbowroom_alloc(int64_t nbytes, int device, void *stream)
{
    void *address = installed == NULL ? NULL : memory_take(installed, nbytes, device, stream);
    if (address == NULL && nbytes != 0)
        refuse(nbytes, device);
    return address;
}

EXPORTED void elbowroom_free(void *address, int64_t nbytes, int device, void *stream)
{
    (void)nbytes, (void)device, (void)stream;
    memory_give(installed, address);
}

EXPORTED void elbowroom_record_stream(void *address, void *stream)
{
    memory_use(installed, address, stream);
}

EXPORTED void elbowroom_empty_cache(void)
{
    memory_empty(installed, -1);
}

/* A CUDA graph works on addresses that it remembers. Nothing here keeps them for it. */
EXPORTED void elbowroom_refuse_pool(int device)
{
    (void)device;
    raise_error(open_loaded("libc10.so"),
                "CUDA graphs and torch.cuda.MemPool need PyTorch's own allocator, and Elbowroom's arena is in its place: "
                "leave out elbowroom.use_planned_allocator(), or the graph.");
}
