/* Steps, the plans that they follow, and the arenas that plans have their blocks in.

     plan    sizes     | 4 | 1 | 9 | 1 | 4 | 2 | ...      the requests of a stream in one kind of step, in order
             offsets   | 0 | 4 | 5 | 4 | - | 0 | ...      -: left to the pool
                               ^ cursor

   A step is expected to follow the plan that came last time after that of the step before.
   A request that is not the one at the cursor is served by a pool. If all before it were those of the plan, another plan
   may begin in the same way and go on with it. Otherwise the place is found again where two requests in a row are those
   of the plan: something was added, or left out. */

#include "parts.h"

#include <stdlib.h>
#include <string.h>

#define MOST_PLANS 8          /* of one stream */
#define FARTHEST 1024         /* places ahead that are looked at by a step that has lost its place */
#define MOST_DRAINED 2        /* steps in a row without a plan, so that an arena becomes free and can be a larger one */
#define MOST_LOGGED (1 << 20) /* events that are kept for whoever drains them */
#define PAUSE 64              /* steps until a larger arena is asked for again */

void note_event(struct device *device, struct event event)
{
    struct log *log = &device->log;
    if (!log->is_on || log->is_torn)
        return;
    if (log->count == log->room) {
        int64_t room = log->room ? 2 * log->room : 1024;
        struct event *events = room > MOST_LOGGED ? NULL : realloc(log->events, (size_t)room * sizeof *events);
        if (events == NULL) {
            free(log->events);
            *log = (struct log){.is_on = true, .is_torn = true};
            return;
        }
        log->events = events;
        log->room = room;
    }
    log->events[log->count++] = event;
}

/* Plans ----------------------------------------------------------------------------------------------------------- */

static void drop_plan(struct plan *plan)
{
    free(plan->sizes);
    free(plan->offsets);
    free(plan);
}

void drop_plans(struct lane *lane)
{
    while (lane->plans != NULL) {
        struct plan *plan = lane->plans;
        lane->plans = plan->next;
        drop_plan(plan);
    }
}

/* Nothing points to a plan any more; a step that follows it does without for its rest. */
static void forget_plan(struct lane *lane, struct plan *plan)
{
    for (struct plan *other = lane->plans; other != NULL; other = other->next)
        if (other->follower == plan)
            other->follower = NULL;
    if (lane->plan == plan)
        lane->plan = NULL;
    if (lane->before == plan)
        lane->before = NULL;
    drop_plan(plan);
}

static bool has_same_sizes(const struct plan *one, const struct plan *other, int64_t count)
{
    return count == 0 || memcmp(one->sizes, other->sizes, (size_t)count * sizeof *one->sizes) == 0;
}

/* A plan of one's own, checked; NULL if it is malformed or there is no room. */
static struct plan *copy_plan(int64_t count, const int64_t *sizes, const int64_t *offsets, int64_t nbytes)
{
    if (count <= 0 || count > MOST_BYTES / (int64_t)sizeof *sizes || nbytes < 0 || nbytes > MOST_BYTES)
        return NULL;
    for (int64_t place = 0; place < count; place++) {
        if (sizes[place] <= 0 || sizes[place] > MOST_BYTES || sizes[place] % UNIT_BYTES != 0)
            return NULL;
        if (offsets[place] >= 0 && (offsets[place] % UNIT_BYTES != 0 || offsets[place] > nbytes - sizes[place]))
            return NULL;
    }
    struct plan *plan = calloc(1, sizeof *plan);
    if (plan == NULL)
        return NULL;
    size_t room = (size_t)count * sizeof *sizes;
    plan->sizes = malloc(room);
    plan->offsets = malloc(room);
    if (plan->sizes == NULL || plan->offsets == NULL) {
        drop_plan(plan);
        return NULL;
    }
    memcpy(plan->sizes, sizes, room);
    memcpy(plan->offsets, offsets, room);
    plan->count = count;
    plan->nbytes = nbytes;
    return plan;
}

int memory_plan(struct memory *memory, int device, void *stream, int64_t count, const int64_t *sizes,
                const int64_t *offsets, int64_t nbytes)
{
    struct plan *plan = device < 0 || device >= MOST_DEVICES ? NULL : copy_plan(count, sizes, offsets, nbytes);
    if (plan == NULL)
        return -1;
    pthread_mutex_lock(&memory->lock);
    struct lane *lane = find_lane(memory, device, stream);
    if (lane != NULL) {
        int64_t kept = 1;
        for (struct plan **link = &lane->plans; *link != NULL;) {
            struct plan *old = *link;
            if ((old->count == count && has_same_sizes(old, plan, count)) || ++kept > MOST_PLANS) {
                *link = old->next;
                forget_plan(lane, old);
            } else {
                link = &old->next;
            }
        }
        plan->next = lane->plans;
        lane->plans = plan;
    } else {
        drop_plan(plan);
    }
    pthread_mutex_unlock(&memory->lock);
    return lane == NULL ? -1 : 0;
}

/* Arenas ---------------------------------------------------------------------------------------------------------- */

static bool is_usable(const struct lane *lane, const struct plan *plan)
{
    return plan->nbytes <= lane->arena_bytes;
}

/* Gives an arena without blocks back. Returns whether there was one. */
bool give_arena(struct memory *memory, struct lane *lane)
{
    if (lane->arena_bytes == 0 || lane->arena_blocks > 0)
        return false;
    struct device *device = &memory->devices[lane->device];
    memory->calls.give(memory->calls.context, lane->device, lane->arena, lane->arena_bytes);
    count_reserved(device, -lane->arena_bytes);
    device->counts.arena_bytes -= lane->arena_bytes;
    lane->arena = 0;
    lane->arena_bytes = 0;
    if (lane->plan != NULL && !is_usable(lane, lane->plan))
        lane->plan = NULL;
    return true;
}

static bool take_arena(struct memory *memory, struct lane *lane, int64_t nbytes)
{
    struct device *device = &memory->devices[lane->device];
    if (memory->calls.take(memory->calls.context, lane->device, nbytes, &lane->arena) != 0)
        return false;
    lane->arena_bytes = nbytes;
    device->has_new_arena = true;
    device->counts.arena_bytes += nbytes;
    count_reserved(device, nbytes);
    return true;
}

/* Has an arena that is large enough for every plan of a stream, if it can be had. Returns whether this step may follow a
   plan: to exchange an arena for a larger one, it has to become empty first. */
static bool prepare_arena(struct memory *memory, struct lane *lane)
{
    int64_t wanted = 0;
    for (struct plan *plan = lane->plans; plan != NULL; plan = plan->next)
        wanted = plan->nbytes > wanted ? plan->nbytes : wanted;
    if (wanted <= lane->arena_bytes)
        return true;
    if (lane->pause > 0) {
        lane->pause--;
        return true;
    }
    if (lane->arena_blocks > 0) {
        if (lane->drained++ < MOST_DRAINED)
            return false;
        lane->drained = 0;
        lane->pause = PAUSE;
        return true;
    }
    lane->drained = 0;
    int64_t before = lane->arena_bytes;
    give_arena(memory, lane);
    release_passed(memory, true); /* the steps so far had their blocks in segments, which would stay beside the arena */
    give_segments(memory, lane->device);
    if (!take_arena(memory, lane, wanted)) {
        lane->pause = PAUSE;
        if (before > 0)
            take_arena(memory, lane, before);
    }
    return true;
}

int memory_begin_step(struct memory *memory, int device)
{
    if (device < 0 || device >= MOST_DEVICES)
        return -1;
    pthread_mutex_lock(&memory->lock);
    struct device *there = &memory->devices[device];
    bool is_first = !there->is_in_step;
    if (is_first) {
        note_event(there, (struct event){.nbytes = STEP_BEGINS});
        for (struct lane *lane = there->lanes; lane != NULL; lane = lane->next) {
            lane->plan = NULL;
            lane->cursor = 0;
            lane->last_bytes = 0;
            lane->is_lost = false;
            if (lane->plans == NULL || !prepare_arena(memory, lane))
                continue;
            lane->plan = lane->before != NULL ? lane->before->follower : NULL;
            if (lane->plan == NULL || !is_usable(lane, lane->plan))
                lane->plan = lane->plans;
            while (lane->plan != NULL && !is_usable(lane, lane->plan))
                lane->plan = lane->plan->next;
        }
        there->is_in_step = true;
    }
    pthread_mutex_unlock(&memory->lock);
    return is_first ? 0 : -1;
}

int memory_end_step(struct memory *memory, int device)
{
    if (device < 0 || device >= MOST_DEVICES)
        return -1;
    pthread_mutex_lock(&memory->lock);
    struct device *there = &memory->devices[device];
    bool was_in_step = there->is_in_step;
    there->is_in_step = false;
    if (there->has_new_arena) { /* what was there when the arena was taken has left its segments by now */
        there->has_new_arena = false;
        give_segments(memory, device);
    }
    for (struct lane *lane = there->lanes; was_in_step && lane != NULL; lane = lane->next) {
        if (lane->plan == NULL)
            continue;
        if (lane->before != NULL)
            lane->before->follower = lane->plan;
        lane->before = lane->plan;
    }
    if (was_in_step)
        note_event(there, (struct event){.nbytes = STEP_ENDS});
    pthread_mutex_unlock(&memory->lock);
    return was_in_step ? 0 : -1;
}

/* Requests -------------------------------------------------------------------------------------------------------- */

/* Another plan that has the same requests so far, and this one next: from here on, it is the one that is followed. */
static bool change_plan(struct lane *lane, int64_t nbytes)
{
    for (struct plan **link = &lane->plans; *link != NULL; link = &(*link)->next) {
        struct plan *plan = *link;
        if (plan->count > lane->cursor && plan->sizes[lane->cursor] == nbytes && is_usable(lane, plan) &&
            has_same_sizes(plan, lane->plan, lane->cursor)) {
            *link = plan->next;
            plan->next = lane->plans;
            lane->plans = lane->plan = plan;
            return true;
        }
    }
    return false;
}

/* The place of a request in the plan; -1 if it is not there. */
static int64_t find_place(struct lane *lane, int64_t nbytes)
{
    const struct plan *plan = lane->plan;
    int64_t before = lane->last_bytes;
    lane->last_bytes = nbytes;
    if (lane->cursor < plan->count && plan->sizes[lane->cursor] == nbytes)
        return lane->cursor++;
    if (!lane->is_lost) {
        if (change_plan(lane, nbytes))
            return lane->cursor++;
        lane->is_lost = true;
    }
    for (int64_t ahead = 1; ahead <= FARTHEST && lane->cursor + ahead < plan->count; ahead++) {
        int64_t place = lane->cursor + ahead;
        if (plan->sizes[place] == nbytes && plan->sizes[place - 1] == before) {
            lane->cursor = place + 1;
            return place;
        }
    }
    return -1;
}

static struct block *place_block(struct memory *memory, struct lane *lane, uintptr_t address, int64_t nbytes)
{
    struct block *block = make_block(memory);
    if (block == NULL)
        return NULL;
    block->address = address;
    block->nbytes = nbytes;
    block->lane = lane;
    block->is_in_arena = true;
    lane->arena_blocks++;
    return block;
}

/* The block that a plan has for this request; NULL if it has none, or its place is not free. */
struct block *take_planned(struct memory *memory, struct lane *lane, int64_t nbytes)
{
    struct counts *counts = &memory->devices[lane->device].counts;
    if (lane->plan == NULL) {
        counts->unplanned++;
        return NULL;
    }
    int64_t place = find_place(lane, nbytes);
    if (place < 0) {
        counts->missed++;
        return NULL;
    }
    int64_t offset = lane->plan->offsets[place];
    if (offset < 0) {
        counts->apart++;
        return NULL;
    }
    uintptr_t address = lane->arena + (uintptr_t)offset;
    const struct block *below = find_below(memory->live, 0, address + (uintptr_t)nbytes - 1);
    bool is_free = below == NULL || below->address + (uintptr_t)below->nbytes <= address;
    struct block *block = is_free ? place_block(memory, lane, address, nbytes) : NULL;
    *(block != NULL ? &counts->hits : &counts->blocked) += 1;
    return block;
}

/* Any free stretch of a stream's arena, from the top down: the last resort before there is no memory. */
struct block *take_gap(struct memory *memory, struct lane *lane, int64_t nbytes)
{
    uintptr_t end = lane->arena + (uintptr_t)lane->arena_bytes;
    while (end - lane->arena >= (uintptr_t)nbytes) {
        const struct block *below = find_below(memory->live, 0, end - 1);
        uintptr_t begin = below == NULL ? lane->arena : below->address + (uintptr_t)below->nbytes;
        if (begin < lane->arena)
            begin = lane->arena;
        if (end - begin >= (uintptr_t)nbytes)
            return place_block(memory, lane, end - (uintptr_t)nbytes, nbytes);
        if (begin == lane->arena)
            break;
        end = below->address;
    }
    return NULL;
}
