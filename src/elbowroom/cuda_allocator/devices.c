/* Where memory comes from: a CUDA device, through the runtime that PyTorch has loaded; or the host, in its place. */

#define _GNU_SOURCE
#include "parts.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Host ------------------------------------------------------------------------------------------------------------ */

struct host {
    int64_t free_bytes;
};

/* Pages come when they are first touched, so that blocks which nobody touches cost nothing. */
static int take_host(void *context, int device, int64_t nbytes, uintptr_t *address)
{
    struct host *host = context;
    (void)device;
    if (nbytes > host->free_bytes)
        return 1;
    void *pages = mmap(NULL, (size_t)nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED)
        return 1;
    host->free_bytes -= nbytes;
    *address = (uintptr_t)pages;
    return 0;
}

static void give_host(void *context, int device, uintptr_t address, int64_t nbytes)
{
    struct host *host = context;
    (void)device;
    munmap((void *)address, (size_t)nbytes);
    host->free_bytes += nbytes;
}

/* What the host has been told to do is done: there is nothing to wait for. */
static int note_host(void *context, int device, void *stream, void **event)
{
    (void)context, (void)device, (void)stream;
    *event = NULL;
    return 0;
}

static bool has_passed_host(void *context, int device, void *event)
{
    (void)context, (void)device, (void)event;
    return true;
}

static void ignore_event(void *context, int device, void *event)
{
    (void)context, (void)device, (void)event;
}

static void settle_host(void *context, int device)
{
    (void)context, (void)device;
}

bool reach_host(struct calls *calls, int64_t capacity_bytes)
{
    struct host *host = malloc(sizeof *host);
    if (host == NULL)
        return false;
    host->free_bytes = capacity_bytes;
    *calls = (struct calls){.take = take_host, .give = give_host, .note = note_host, .has_passed = has_passed_host,
                            .await = ignore_event, .forget = ignore_event, .settle = settle_host, .close = free,
                            .context = host};
    return true;
}

/* CUDA ------------------------------------------------------------------------------------------------------------ */

#define CUDA_EVENT_DISABLE_TIMING 2
#define CUDA_ERROR_NOT_READY 600

struct cuda {
    void *library;
    int (*malloc)(void **, size_t);
    int (*free)(void *);
    int (*get_device)(int *);
    int (*set_device)(int);
    int (*get_last_error)(void);
    int (*event_create)(void **, unsigned);
    int (*event_record)(void *, void *);
    int (*event_query)(void *);
    int (*event_synchronize)(void *);
    int (*event_destroy)(void *);
    int (*device_synchronize)(void);
};

/* Makes a device the thread's current one. Returns the one that was. */
static int enter(struct cuda *cuda, int device)
{
    int before = device;
    cuda->get_device(&before);
    if (before != device)
        cuda->set_device(device);
    return before;
}

/* Back to the device before. What failed here is no error of the program's, which would find it at its next launch. */
static int leave(struct cuda *cuda, int device, int before, int error)
{
    if (error != 0)
        cuda->get_last_error();
    if (before != device)
        cuda->set_device(before);
    return error;
}

static int take_cuda(void *context, int device, int64_t nbytes, uintptr_t *address)
{
    struct cuda *cuda = context;
    void *taken = NULL;
    int before = enter(cuda, device);
    int error = cuda->malloc(&taken, (size_t)nbytes);
    *address = (uintptr_t)taken;
    return leave(cuda, device, before, error);
}

/* The runtime waits for what the device has been given before it frees. */
static void give_cuda(void *context, int device, uintptr_t address, int64_t nbytes)
{
    struct cuda *cuda = context;
    (void)nbytes;
    int before = enter(cuda, device);
    leave(cuda, device, before, cuda->free((void *)address));
}

static int note_cuda(void *context, int device, void *stream, void **event)
{
    struct cuda *cuda = context;
    int before = enter(cuda, device);
    int error = cuda->event_create(event, CUDA_EVENT_DISABLE_TIMING);
    if (error == 0) {
        error = cuda->event_record(*event, stream);
        if (error != 0)
            cuda->event_destroy(*event);
    }
    return leave(cuda, device, before, error);
}

static bool has_passed_cuda(void *context, int device, void *event)
{
    struct cuda *cuda = context;
    int before = enter(cuda, device);
    return leave(cuda, device, before, cuda->event_query(event)) != CUDA_ERROR_NOT_READY;
}

static void await_cuda(void *context, int device, void *event)
{
    struct cuda *cuda = context;
    int before = enter(cuda, device);
    leave(cuda, device, before, cuda->event_synchronize(event));
}

static void forget_cuda(void *context, int device, void *event)
{
    struct cuda *cuda = context;
    int before = enter(cuda, device);
    leave(cuda, device, before, cuda->event_destroy(event));
}

static void settle_cuda(void *context, int device)
{
    struct cuda *cuda = context;
    int before = enter(cuda, device);
    leave(cuda, device, before, cuda->device_synchronize());
}

static void close_cuda(void *context)
{
    struct cuda *cuda = context;
    dlclose(cuda->library);
    free(cuda);
}

bool reach_cuda(struct calls *calls, const char *library)
{
    struct cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL)
        return false;
    cuda->library = dlopen(library == NULL || *library == 0 ? NULL : library, RTLD_LAZY | RTLD_LOCAL);
    bool is_whole = cuda->library != NULL;
    const struct {
        const char *name;
        void *where;
    } wanted[] = {
        {"cudaMalloc", &cuda->malloc},
        {"cudaFree", &cuda->free},
        {"cudaGetDevice", &cuda->get_device},
        {"cudaSetDevice", &cuda->set_device},
        {"cudaGetLastError", &cuda->get_last_error},
        {"cudaEventCreateWithFlags", &cuda->event_create},
        {"cudaEventRecord", &cuda->event_record},
        {"cudaEventQuery", &cuda->event_query},
        {"cudaEventSynchronize", &cuda->event_synchronize},
        {"cudaEventDestroy", &cuda->event_destroy},
        {"cudaDeviceSynchronize", &cuda->device_synchronize},
    };
    for (size_t index = 0; is_whole && index < sizeof wanted / sizeof *wanted; index++) {
        void *function = dlsym(cuda->library, wanted[index].name);
        is_whole = function != NULL;
        *(void **)wanted[index].where = function;
    }
    if (!is_whole) {
        if (cuda->library != NULL)
            dlclose(cuda->library);
        free(cuda);
        return false;
    }
    *calls = (struct calls){.take = take_cuda, .give = give_cuda, .note = note_cuda, .has_passed = has_passed_cuda,
                            .await = await_cuda, .forget = forget_cuda, .settle = settle_cuda, .close = close_cuda,
                            .context = cuda};
    return true;
}
