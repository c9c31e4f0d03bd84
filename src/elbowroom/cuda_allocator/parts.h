/* What the files of this library share. */

#ifndef ELBOWROOM_PARTS_H
#define ELBOWROOM_PARTS_H

#include "memory.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#define UNIT_BYTES 512
#define MOST_BYTES (INT64_C(1) << 61)

/* Every stretch of memory: handed out, on its way back, or free in a segment. It is in exactly one tree. */
struct block {
    uintptr_t address;
    int64_t nbytes;
    int64_t key; /* in a tree of free blocks: its bytes; in that of live ones: 0. Trees are ordered by (key, address). */
    struct block *left, *right;
    uint32_t priority;
    enum { FREE, LIVE, LEAVING } state;
    bool is_small, is_in_arena;
    bool must_settle;            /* another stream used it, and there was no room to note which */
    struct lane *lane;
    uintptr_t segment;            /* where its segment begins; 0 in an arena */
    struct block *before, *after; /* its neighbours in the segment */
    struct block *next;           /* unused nodes, and blocks that are leaving */
    struct use *uses;
    int64_t serial;
};

/* Another stream works on a block; once the block is given back, the event that this work ends with. */
struct use {
    void *stream, *event;
    struct use *next;
};

struct plan {
    int64_t count, nbytes;
    int64_t *sizes, *offsets;
    struct plan *follower; /* the plan of the step that last came after one of this plan */
    struct plan *next;
};

/* One stream of one device, with all that belongs to it. */
struct lane {
    int device;
    void *stream;
    struct block *free[2][2]; /* trees, by whether blocks are small, and whether they are whole segments */
    uintptr_t arena;
    int64_t arena_bytes, arena_blocks;
    int64_t pause;         /* for so many steps no larger arena is asked for */
    int64_t drained;       /* so many steps in a row have followed no plan, for the arena to become empty */
    struct plan *plans;    /* the last used one first */
    struct plan *plan;     /* that this step follows; NULL for none */
    struct plan *before;   /* that the step before has followed */
    int64_t cursor;        /* the place in it of the next request */
    int64_t last_bytes;    /* of the request before */
    bool is_lost;          /* the requests of this step so far are not the first ones of the plan */
    struct lane *next;
};

struct log {
    struct event *events;
    int64_t count, room;
    bool is_on, is_torn;
};

struct device {
    struct lane *lanes; /* the last used one first */
    struct counts counts;
    struct log log;
    bool is_in_step, has_new_arena;
};

/* What a device is asked for. 0 is success. Streams and events are opaque. */
struct calls {
    int (*take)(void *context, int device, int64_t nbytes, uintptr_t *address);
    void (*give)(void *context, int device, uintptr_t address, int64_t nbytes);
    int (*note)(void *context, int device, void *stream, void **event); /* all the stream has been given up to now */
    bool (*has_passed)(void *context, int device, void *event);
    void (*await)(void *context, int device, void *event);
    void (*forget)(void *context, int device, void *event);
    void (*settle)(void *context, int device); /* until the device has done all it was given */
    void (*close)(void *context);
    void *context;
};

struct memory {
    pthread_mutex_t lock;
    struct calls calls;
    struct device devices[MOST_DEVICES];
    struct block *live; /* tree of all that is handed out or leaving, on all devices */
    struct block *leaving, **last_leaving;
    struct block *unused;
    struct chunk *chunks;
    uint32_t chance;
    int64_t serial;
};

/* blocks.c */
struct block *make_block(struct memory *memory);
void drop_block(struct memory *memory, struct block *block);
void drop_chunks(struct memory *memory);
void put(struct block **tree, struct block *block, int64_t key);
void pull(struct block **tree, struct block *block);
struct block *find_above(struct block *tree, int64_t key, uintptr_t address); /* the first at or above */
struct block *find_below(struct block *tree, int64_t key, uintptr_t address); /* the last at or below */

/* devices.c */
bool reach_host(struct calls *calls, int64_t capacity_bytes);
bool reach_cuda(struct calls *calls, const char *library);

/* pools.c */
struct block *take_from_pool(struct memory *memory, struct lane *lane, int64_t nbytes);
void release(struct memory *memory, struct block *block);
int64_t give_segments(struct memory *memory, int device);
void count_reserved(struct device *device, int64_t nbytes);

/* plans.c */
struct block *take_planned(struct memory *memory, struct lane *lane, int64_t nbytes);
struct block *take_gap(struct memory *memory, struct lane *lane, int64_t nbytes);
bool give_arena(struct memory *memory, struct lane *lane);
void drop_plans(struct lane *lane);
void note_event(struct device *device, struct event event);

/* memory.c */
struct lane *find_lane(struct memory *memory, int device, void *stream);
void release_passed(struct memory *memory, bool must_wait);

#endif
