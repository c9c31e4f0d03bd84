/* Device memory handed out block by block: from planned addresses in steps that are known, from pools otherwise.

   request --> is this the request that comes next in the plan of its stream, and is its place free?
                 | yes                              | no
                 v                                  v
     arena  |..|block|....|block|.|      pool: segments |block|free|block|   best fit, always cut
            one a stream, never moved                     taken from the device as they are needed

   Whatever a plan says, no byte is handed out that is not free: the plan is a wish, and the tree of live blocks decides.
   A block belongs to the stream that it was asked for on, and so does every arena and segment: what was given back is
   handed out again on that stream only, whose work runs in order. Where other streams used a block, too, it waits for
   them. All sizes are in bytes and 64 bits wide. Every function may be called from any thread. */

#ifndef ELBOWROOM_MEMORY_H
#define ELBOWROOM_MEMORY_H

#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

#define MOST_DEVICES 64

struct memory;

/* Of one device. Peaks are since the last `memory_reset_peaks`, the counts of requests since the beginning. */
struct counts {
    int64_t allocated_bytes, allocated_peak_bytes; /* in blocks that are handed out, each a multiple of 512 bytes */
    int64_t reserved_bytes, reserved_peak_bytes;   /* taken from the device: arenas and segments */
    int64_t arena_bytes, arena_used_bytes;         /* of `reserved_bytes`; of `allocated_bytes` */
    int64_t requests;                              /* that were served */
    int64_t hits;                                  /* of them: at the address that was planned */
    int64_t missed;                                /* in a step with a plan, and not what the plan has there */
    int64_t blocked;                               /* what the plan has there, but something is still in its place */
    int64_t apart;                                 /* which the plan leaves to the pool */
    int64_t unplanned;                             /* in a step, on a stream that has no plan */
    int64_t failed;                                /* not served: the device has no room */
    int64_t retries;                               /* served only after memory was given back to the device */
    int64_t unknown;                               /* given back, and not ours or not handed out */
    int64_t leaving;                               /* blocks given back that another stream still works on */
};

/* What happened, in order, while recording. */
struct event {
    int64_t nbytes; /* taken (a multiple of 512); 0: given back; STEP_BEGINS, STEP_ENDS */
    int64_t serial; /* of the block: every request has its own, and they go up */
    void *stream;   /* the block's */
    void *segment;  /* where the segment begins that the block lies in; NULL in an arena */
};

#define STEP_BEGINS (-1)
#define STEP_ENDS (-2)

/* Where memory comes from. Host memory stands in for a device's in tests: it is never touched before it is used.
   NULL: no room for the bookkeeping, or (CUDA) `library` is not a CUDA runtime; NULL or "" names the program itself. */
EXPORTED struct memory *memory_open_host(int64_t capacity_bytes);
EXPORTED struct memory *memory_open_cuda(const char *library);

/* Gives everything back to the device. Returns how many blocks are still handed out; if there are any, does nothing. */
EXPORTED int64_t memory_close(struct memory *memory);

/* A block of at least `nbytes`, aligned to 512; NULL for none (0 bytes and fewer) and if there is no room. */
EXPORTED void *memory_take(struct memory *memory, int64_t nbytes, int device, void *stream);

/* 0, or -1 if no block that is handed out begins there (NULL is fine). */
EXPORTED int memory_give(struct memory *memory, void *address);

/* Another stream works on a block: once given back, it waits for what that stream has been given up to then. */
EXPORTED int memory_use(struct memory *memory, void *address, void *stream);

/* Give what nobody uses back to the device: segments without blocks, and arenas outside of steps. -1: all devices. */
EXPORTED void memory_empty(struct memory *memory, int device);

/* A plan for the requests of a stream in one kind of step: the n-th is of sizes[n] bytes and lies at offsets[n] of an
   arena of `nbytes`, or in the pool where that is negative. A plan with the same sizes is replaced; of too many, the one
   that was not used for longest goes. 0, or -1: malformed, or no room for the bookkeeping. */
EXPORTED int memory_plan(struct memory *memory, int device, void *stream, int64_t count, const int64_t *sizes,
                         const int64_t *offsets, int64_t nbytes);

/* A step begins and ends. 0, or -1 where it already has, or has not, begun. Arenas are taken when a step begins. */
EXPORTED int memory_begin_step(struct memory *memory, int device);
EXPORTED int memory_end_step(struct memory *memory, int device);

/* Write down what happens on a device from now on, or stop and forget it. */
EXPORTED void memory_record(struct memory *memory, int device, int is_on);

/* Hand over at most `most` events, the oldest first, and forget them. Returns how many there were; -1 if some were lost
   because there was no room to write them down, after which none are left. */
EXPORTED int64_t memory_drain(struct memory *memory, int device, struct event *events, int64_t most);

/* Describes at most `most` of the blocks that are handed out on a device, as if they had just been taken. Returns how many
   there are. */
EXPORTED int64_t memory_list(struct memory *memory, int device, struct event *blocks, int64_t most);

EXPORTED void memory_count(struct memory *memory, int device, struct counts *counts);
EXPORTED void memory_reset_peaks(struct memory *memory, int device);

/* 0 if the books agree with each other; otherwise the line of the check that failed. Linear in all blocks. */
EXPORTED int memory_check(struct memory *memory);

#endif
