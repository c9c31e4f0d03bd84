/* Requests as they come in, and the books: one lock for all. */

#include "parts.h"

#include <stdlib.h>

static struct memory *open_memory(void)
{
    struct memory *memory = calloc(1, sizeof *memory);
    if (memory == NULL)
        return NULL;
    pthread_mutex_init(&memory->lock, NULL);
    memory->last_leaving = &memory->leaving;
    memory->chance = 2463534242u;
    return memory;
}

struct memory *memory_open_host(int64_t capacity_bytes)
{
    struct memory *memory = open_memory();
    if (memory != NULL && !reach_host(&memory->calls, capacity_bytes)) {
        free(memory);
        return NULL;
    }
    return memory;
}

struct memory *memory_open_cuda(const char *library)
{
    struct memory *memory = open_memory();
    if (memory != NULL && !reach_cuda(&memory->calls, library)) {
        free(memory);
        return NULL;
    }
    return memory;
}

int64_t memory_close(struct memory *memory)
{
    pthread_mutex_lock(&memory->lock);
    release_passed(memory, true);
    int64_t left = 0;
    for (struct block *block = find_above(memory->live, 0, 0); block != NULL;
         block = find_above(memory->live, 0, block->address + 1))
        left++;
    if (left > 0) {
        pthread_mutex_unlock(&memory->lock);
        return left;
    }
    for (int device = 0; device < MOST_DEVICES; device++) {
        struct device *there = &memory->devices[device];
        give_segments(memory, device);
        while (there->lanes != NULL) {
            struct lane *lane = there->lanes;
            there->lanes = lane->next;
            give_arena(memory, lane);
            drop_plans(lane);
            free(lane);
        }
        free(there->log.events);
    }
    memory->calls.close(memory->calls.context);
    drop_chunks(memory);
    pthread_mutex_unlock(&memory->lock);
    pthread_mutex_destroy(&memory->lock);
    free(memory);
    return 0;
}

/* The one of a stream, made when it is first asked for; NULL if there is no room to write it down. */
struct lane *find_lane(struct memory *memory, int device, void *stream)
{
    struct device *there = &memory->devices[device];
    for (struct lane **link = &there->lanes; *link != NULL; link = &(*link)->next) {
        struct lane *lane = *link;
        if (lane->stream == stream) {
            *link = lane->next;
            lane->next = there->lanes;
            there->lanes = lane;
            return lane;
        }
    }
    struct lane *lane = calloc(1, sizeof *lane);
    if (lane == NULL)
        return NULL;
    lane->device = device;
    lane->stream = stream;
    lane->next = there->lanes;
    there->lanes = lane;
    return lane;
}

static struct event describe(const struct block *block, int64_t nbytes)
{
    return (struct event){
        .nbytes = nbytes, .serial = block->serial, .stream = block->lane->stream, .segment = (void *)block->segment};
}

void *memory_take(struct memory *memory, int64_t nbytes, int device, void *stream)
{
    if (nbytes <= 0 || device < 0 || device >= MOST_DEVICES)
        return NULL;
    pthread_mutex_lock(&memory->lock);
    struct device *there = &memory->devices[device];
    struct block *block = NULL;
    struct lane *lane = nbytes <= MOST_BYTES ? find_lane(memory, device, stream) : NULL;
    if (lane != NULL) {
        nbytes = (nbytes + UNIT_BYTES - 1) / UNIT_BYTES * UNIT_BYTES;
        release_passed(memory, false);
        if (there->is_in_step)
            block = take_planned(memory, lane, nbytes);
        if (block == NULL)
            block = take_from_pool(memory, lane, nbytes);
    }
    struct counts *counts = &there->counts;
    if (block == NULL) {
        counts->failed++;
        pthread_mutex_unlock(&memory->lock);
        return NULL;
    }
    block->state = LIVE;
    block->serial = ++memory->serial;
    put(&memory->live, block, 0);
    note_event(there, describe(block, block->nbytes));
    counts->requests++;
    counts->arena_used_bytes += block->is_in_arena ? block->nbytes : 0;
    counts->allocated_bytes += block->nbytes;
    if (counts->allocated_bytes > counts->allocated_peak_bytes)
        counts->allocated_peak_bytes = counts->allocated_bytes;
    void *address = (void *)block->address;
    pthread_mutex_unlock(&memory->lock);
    return address;
}

/* The block that is handed out at an address. */
static struct block *find_live(struct memory *memory, void *address)
{
    struct block *block = find_above(memory->live, 0, (uintptr_t)address);
    return block != NULL && block->address == (uintptr_t)address && block->state == LIVE ? block : NULL;
}

static void drop_uses(struct memory *memory, struct block *block, bool have_events)
{
    while (block->uses != NULL) {
        struct use *use = block->uses;
        block->uses = use->next;
        if (have_events)
            memory->calls.forget(memory->calls.context, block->lane->device, use->event);
        free(use);
    }
}

/* A block that other streams may still work on is given back when they are done. */
static void let_leave(struct memory *memory, struct block *block)
{
    struct calls *calls = &memory->calls;
    int device = block->lane->device;
    for (struct use *use = block->uses; use != NULL && !block->must_settle; use = use->next) {
        if (calls->note(calls->context, device, use->stream, &use->event) == 0)
            continue;
        block->must_settle = true;
        for (struct use *noted = block->uses; noted != use; noted = noted->next)
            calls->forget(calls->context, device, noted->event);
    }
    if (block->must_settle) { /* the stream may be another device's */
        for (int each = 0; each < MOST_DEVICES; each++)
            if (memory->devices[each].lanes != NULL)
                calls->settle(calls->context, each);
        drop_uses(memory, block, false);
        release(memory, block);
        return;
    }
    block->state = LEAVING;
    block->next = NULL;
    *memory->last_leaving = block;
    memory->last_leaving = &block->next;
    memory->devices[device].counts.leaving++;
}

/* Releases blocks that are leaving, the first ones first, up to one that is still worked on; or waits for all. */
void release_passed(struct memory *memory, bool must_wait)
{
    struct calls *calls = &memory->calls;
    while (memory->leaving != NULL) {
        struct block *block = memory->leaving;
        int device = block->lane->device;
        for (struct use *use = block->uses; use != NULL; use = use->next) {
            if (must_wait)
                calls->await(calls->context, device, use->event);
            else if (!calls->has_passed(calls->context, device, use->event))
                return;
        }
        memory->leaving = block->next;
        if (memory->leaving == NULL)
            memory->last_leaving = &memory->leaving;
        memory->devices[device].counts.leaving--;
        drop_uses(memory, block, true);
        release(memory, block);
    }
}

int memory_give(struct memory *memory, void *address)
{
    if (address == NULL)
        return 0;
    pthread_mutex_lock(&memory->lock);
    struct block *block = find_live(memory, address);
    if (block == NULL) {
        memory->devices[0].counts.unknown++; /* nobody knows whose it would be */
    } else {
        struct device *there = &memory->devices[block->lane->device];
        note_event(there, describe(block, 0));
        there->counts.allocated_bytes -= block->nbytes;
        there->counts.arena_used_bytes -= block->is_in_arena ? block->nbytes : 0;
        if (block->uses != NULL || block->must_settle)
            let_leave(memory, block);
        else
            release(memory, block);
    }
    pthread_mutex_unlock(&memory->lock);
    return block == NULL ? -1 : 0;
}

int memory_use(struct memory *memory, void *address, void *stream)
{
    if (address == NULL)
        return 0;
    pthread_mutex_lock(&memory->lock);
    struct block *block = find_live(memory, address);
    bool is_known = block != NULL && stream == block->lane->stream;
    for (struct use *use = block == NULL ? NULL : block->uses; use != NULL; use = use->next)
        is_known = is_known || use->stream == stream;
    if (block != NULL && !is_known) {
        struct use *use = malloc(sizeof *use);
        if (use != NULL) {
            *use = (struct use){.stream = stream, .next = block->uses};
            block->uses = use;
        } else {
            block->must_settle = true;
        }
    }
    pthread_mutex_unlock(&memory->lock);
    return block == NULL ? -1 : 0;
}

void memory_empty(struct memory *memory, int device)
{
    pthread_mutex_lock(&memory->lock);
    release_passed(memory, true);
    for (int each = 0; each < MOST_DEVICES; each++) {
        if (device >= 0 && each != device)
            continue;
        give_segments(memory, each);
        struct lane *lane = memory->devices[each].is_in_step ? NULL : memory->devices[each].lanes;
        for (; lane != NULL; lane = lane->next)
            give_arena(memory, lane);
    }
    pthread_mutex_unlock(&memory->lock);
}

/* Books ----------------------------------------------------------------------------------------------------------- */

void memory_record(struct memory *memory, int device, int is_on)
{
    if (device < 0 || device >= MOST_DEVICES)
        return;
    pthread_mutex_lock(&memory->lock);
    struct log *log = &memory->devices[device].log;
    free(log->events);
    *log = (struct log){.is_on = is_on};
    pthread_mutex_unlock(&memory->lock);
}

int64_t memory_drain(struct memory *memory, int device, struct event *events, int64_t most)
{
    if (device < 0 || device >= MOST_DEVICES)
        return 0;
    pthread_mutex_lock(&memory->lock);
    struct log *log = &memory->devices[device].log;
    int64_t count = log->count < most ? log->count : most;
    bool was_torn = log->is_torn;
    for (int64_t index = 0; index < count; index++)
        events[index] = log->events[index];
    for (int64_t index = count; index < log->count; index++)
        log->events[index - count] = log->events[index];
    log->count -= count;
    log->is_torn = false;
    pthread_mutex_unlock(&memory->lock);
    return was_torn ? -1 : count;
}

int64_t memory_list(struct memory *memory, int device, struct event *blocks, int64_t most)
{
    int64_t count = 0;
    pthread_mutex_lock(&memory->lock);
    for (struct block *block = find_above(memory->live, 0, 0); block != NULL;
         block = find_above(memory->live, 0, block->address + 1)) {
        if (block->lane->device != device || block->state != LIVE)
            continue;
        if (count < most)
            blocks[count] = describe(block, block->nbytes);
        count++;
    }
    pthread_mutex_unlock(&memory->lock);
    return count;
}

void memory_count(struct memory *memory, int device, struct counts *counts)
{
    *counts = (struct counts){0};
    if (device < 0 || device >= MOST_DEVICES)
        return;
    pthread_mutex_lock(&memory->lock);
    *counts = memory->devices[device].counts;
    pthread_mutex_unlock(&memory->lock);
}

void memory_reset_peaks(struct memory *memory, int device)
{
    if (device < 0 || device >= MOST_DEVICES)
        return;
    pthread_mutex_lock(&memory->lock);
    struct counts *counts = &memory->devices[device].counts;
    counts->allocated_peak_bytes = counts->allocated_bytes;
    counts->reserved_peak_bytes = counts->reserved_bytes;
    pthread_mutex_unlock(&memory->lock);
}

/* What a walk over a device's blocks has found. */
struct sums {
    int64_t allocated_bytes, arena_used_bytes, leaving;
};

#define DEMAND(fact)                                                                                                  \
    do {                                                                                                              \
        if (!(fact))                                                                                                  \
            return __LINE__;                                                                                          \
    } while (0)

/* No two live blocks lie upon each other; each in its arena or between its neighbours. */
static int check_live(struct memory *memory, struct sums *sums)
{
    uintptr_t end = 0;
    for (struct block *block = find_above(memory->live, 0, 0); block != NULL;
         block = find_above(memory->live, 0, block->address + 1)) {
        struct lane *lane = block->lane;
        DEMAND(block->state != FREE && block->key == 0 && block->nbytes > 0 && block->nbytes % UNIT_BYTES == 0);
        DEMAND(block->address >= end && block->address % UNIT_BYTES == 0);
        end = block->address + (uintptr_t)block->nbytes;
        if (block->is_in_arena)
            DEMAND(block->address >= lane->arena && end <= lane->arena + (uintptr_t)lane->arena_bytes);
        DEMAND(block->before == NULL || block->before->address + (uintptr_t)block->before->nbytes == block->address);
        DEMAND(block->after == NULL || (block->after->address == end && block->after->before == block));
        struct sums *sum = &sums[lane->device];
        sum->leaving += block->state == LEAVING;
        sum->allocated_bytes += block->state == LIVE ? block->nbytes : 0;
        sum->arena_used_bytes += block->state == LIVE && block->is_in_arena ? block->nbytes : 0;
    }
    return 0;
}

/* Every byte that is reserved is in an arena or in a block, and no two free blocks are neighbours. */
static int check_device(struct memory *memory, int device)
{
    int64_t reserved_bytes = 0, arena_bytes = 0;
    for (struct lane *lane = memory->devices[device].lanes; lane != NULL; lane = lane->next) {
        reserved_bytes += lane->arena_bytes;
        arena_bytes += lane->arena_bytes;
        for (int which = 0; which < 4; which++) {
            bool is_small = which / 2, is_whole = which % 2;
            struct block *tree = lane->free[is_small][is_whole];
            for (struct block *block = find_above(tree, 0, 0); block != NULL;
                 block = find_above(tree, block->key, block->address + 1)) {
                DEMAND(block->state == FREE && block->key == block->nbytes && block->lane == lane);
                DEMAND(block->is_small == is_small && block->uses == NULL);
                DEMAND((block->before == NULL && block->after == NULL) == is_whole);
                DEMAND(block->before == NULL || block->before->state != FREE);
                DEMAND(block->after == NULL || block->after->state != FREE);
                reserved_bytes += block->nbytes;
            }
        }
    }
    for (struct block *block = find_above(memory->live, 0, 0); block != NULL;
         block = find_above(memory->live, 0, block->address + 1))
        reserved_bytes += block->lane->device == device && !block->is_in_arena ? block->nbytes : 0;
    DEMAND(reserved_bytes == memory->devices[device].counts.reserved_bytes);
    DEMAND(arena_bytes == memory->devices[device].counts.arena_bytes);
    return 0;
}

static int check_books(struct memory *memory)
{
    struct sums sums[MOST_DEVICES] = {{0}};
    int wrong = check_live(memory, sums);
    for (int device = 0; device < MOST_DEVICES && wrong == 0; device++) {
        const struct counts *counts = &memory->devices[device].counts;
        if (memory->devices[device].lanes == NULL)
            continue;
        DEMAND(counts->allocated_bytes == sums[device].allocated_bytes);
        DEMAND(counts->arena_used_bytes == sums[device].arena_used_bytes);
        DEMAND(counts->leaving == sums[device].leaving);
        DEMAND(counts->allocated_peak_bytes >= counts->allocated_bytes);
        DEMAND(counts->reserved_peak_bytes >= counts->reserved_bytes);
        wrong = check_device(memory, device);
    }
    return wrong;
}

int memory_check(struct memory *memory)
{
    pthread_mutex_lock(&memory->lock);
    int wrong = check_books(memory);
    pthread_mutex_unlock(&memory->lock);
    return wrong;
}
