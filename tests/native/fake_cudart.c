/* A CUDA runtime that has no device: what the arena's library calls, on host memory, and what tests set. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define MOST_PIECES 4096
#define MOST_STREAMS 64
#define OUT_OF_MEMORY 2
#define INVALID 1
#define NOT_READY 600

static struct {
    void *address;
    size_t nbytes;
    int device;
} pieces[MOST_PIECES];

struct event {
    void *stream;
    int was_recorded, has_passed;
};

static _Thread_local int current_device;
static _Thread_local int last_error;
static int64_t capacity = INT64_C(1) << 50;
static int64_t taken, events, settled;
static int events_fail;
static void *held[MOST_STREAMS];
static struct event *waiting[MOST_PIECES];

static int failed(int error)
{
    last_error = error;
    return error;
}

/* What tests set and ask ------------------------------------------------------------------------------------------- */

void fake_set_capacity(int64_t nbytes) { capacity = nbytes; }
void fake_fail_events(int is_on) { events_fail = is_on; }
int64_t fake_taken(void) { return taken; }
int64_t fake_events(void) { return events; }
int64_t fake_settled(void) { return settled; }
int fake_last_error(void) { return last_error; }
int fake_device(void) { return current_device; }

/* From now on the events of a stream do not pass, until they are let pass. */
void fake_hold(void *stream)
{
    for (int index = 0; index < MOST_STREAMS; index++)
        if (held[index] == NULL) {
            held[index] = stream;
            return;
        }
}

void fake_let_pass(void *stream)
{
    for (int index = 0; index < MOST_STREAMS; index++)
        if (held[index] == stream)
            held[index] = NULL;
    for (int index = 0; index < MOST_PIECES; index++)
        if (waiting[index] != NULL && waiting[index]->stream == stream) {
            waiting[index]->has_passed = 1;
            waiting[index] = NULL;
        }
}

/* Of which device an address is; -1 if of none. */
int fake_owner(void *address)
{
    for (int index = 0; index < MOST_PIECES; index++)
        if (pieces[index].address != NULL && (char *)address >= (char *)pieces[index].address &&
            (char *)address < (char *)pieces[index].address + pieces[index].nbytes)
            return pieces[index].device;
    return -1;
}

/* The runtime ------------------------------------------------------------------------------------------------------ */

int cudaMalloc(void **address, size_t nbytes)
{
    *address = NULL;
    if (taken + (int64_t)nbytes > capacity)
        return failed(OUT_OF_MEMORY);
    for (int index = 0; index < MOST_PIECES; index++) {
        if (pieces[index].address != NULL)
            continue;
        void *pages = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages == MAP_FAILED)
            break;
        pieces[index].address = *address = pages;
        pieces[index].nbytes = nbytes;
        pieces[index].device = current_device;
        taken += (int64_t)nbytes;
        return 0;
    }
    return failed(OUT_OF_MEMORY);
}

int cudaFree(void *address)
{
    for (int index = 0; index < MOST_PIECES; index++) {
        if (pieces[index].address != address || pieces[index].device != current_device)
            continue;
        munmap(address, pieces[index].nbytes);
        taken -= (int64_t)pieces[index].nbytes;
        pieces[index].address = NULL;
        return 0;
    }
    return failed(INVALID);
}

int cudaGetDevice(int *device)
{
    *device = current_device;
    return 0;
}

int cudaSetDevice(int device)
{
    current_device = device;
    return 0;
}

int cudaGetLastError(void)
{
    int error = last_error;
    last_error = 0;
    return error;
}

int cudaEventCreateWithFlags(void **event, unsigned flags)
{
    (void)flags;
    if (events_fail)
        return failed(INVALID);
    *event = calloc(1, sizeof(struct event));
    events += *event != NULL;
    return *event == NULL ? failed(OUT_OF_MEMORY) : 0;
}

int cudaEventRecord(void *given, void *stream)
{
    struct event *event = given;
    event->stream = stream;
    event->was_recorded = event->has_passed = 1;
    for (int index = 0; index < MOST_STREAMS; index++)
        if (held[index] != NULL && held[index] == stream)
            event->has_passed = 0;
    for (int index = 0; !event->has_passed && index < MOST_PIECES; index++)
        if (waiting[index] == NULL) {
            waiting[index] = event;
            return 0;
        }
    return 0;
}

int cudaEventQuery(void *given)
{
    return ((struct event *)given)->has_passed ? 0 : failed(NOT_READY);
}

int cudaEventSynchronize(void *given)
{
    struct event *event = given;
    event->has_passed = 1;
    for (int index = 0; index < MOST_PIECES; index++)
        if (waiting[index] == event)
            waiting[index] = NULL;
    return 0;
}

int cudaEventDestroy(void *event)
{
    for (int index = 0; index < MOST_PIECES; index++)
        if (waiting[index] == event)
            waiting[index] = NULL;
    free(event);
    events--;
    return 0;
}

int cudaDeviceSynchronize(void)
{
    settled++;
    return 0;
}
