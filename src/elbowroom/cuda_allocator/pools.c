/* Pools: segments of a stream, cut into blocks as they are asked for; free neighbours are joined again.

   Blocks of up to 1 MiB have segments of their own, so that they do not cut up the large ones. A segment that is free as
   a whole is cut only where no other has room: what stays for long keeps as few segments as it can. */

#include "parts.h"

#define SMALL_BYTES (INT64_C(1) << 20)
#define PAGE_BYTES (INT64_C(2) << 20)       /* a segment of small blocks; what larger ones are multiples of */
#define SEGMENT_BYTES (INT64_C(20) << 20)   /* of blocks up to */
#define LEAST_OWN_BYTES (INT64_C(10) << 20) /* from which on a block gets a segment of its size */

void count_reserved(struct device *device, int64_t nbytes)
{
    device->counts.reserved_bytes += nbytes;
    if (device->counts.reserved_bytes > device->counts.reserved_peak_bytes)
        device->counts.reserved_peak_bytes = device->counts.reserved_bytes;
}

static int64_t round_pages(int64_t nbytes)
{
    return (nbytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static struct block **find_tree(struct block *block)
{
    return &block->lane->free[block->is_small][block->before == NULL && block->after == NULL];
}

/* Gives the free segments of a device back. Returns their bytes. */
int64_t give_segments(struct memory *memory, int device)
{
    int64_t given = 0;
    for (struct lane *lane = memory->devices[device].lanes; lane != NULL; lane = lane->next) {
        for (int is_small = 0; is_small < 2; is_small++) {
            struct block **whole = &lane->free[is_small][true];
            while (*whole != NULL) {
                struct block *block = *whole;
                pull(whole, block);
                memory->calls.give(memory->calls.context, device, block->address, block->nbytes);
                given += block->nbytes;
                drop_block(memory, block);
            }
        }
    }
    count_reserved(&memory->devices[device], -given);
    return given;
}

static struct block *add_segment(struct memory *memory, struct lane *lane, int64_t nbytes, bool is_small)
{
    struct block *block = make_block(memory);
    if (block == NULL)
        return NULL;
    if (memory->calls.take(memory->calls.context, lane->device, nbytes, &block->address) != 0) {
        drop_block(memory, block);
        return NULL;
    }
    block->nbytes = nbytes;
    block->segment = block->address;
    block->lane = lane;
    block->is_small = is_small;
    count_reserved(&memory->devices[lane->device], nbytes);
    return block;
}

/* The smallest free block that is large enough, of those the lowest; a whole segment only where it is about the size. */
static struct block *find_free(struct lane *lane, int64_t nbytes, bool is_small)
{
    struct block *block = find_above(lane->free[is_small][false], nbytes, 0);
    struct block *whole = find_above(lane->free[is_small][true], nbytes, 0);
    if (block == NULL || (whole != NULL && whole->nbytes < block->nbytes && whole->nbytes - nbytes < PAGE_BYTES))
        block = whole;
    if (block != NULL)
        pull(find_tree(block), block);
    return block;
}

/* A segment in the place of arenas that are empty. */
static struct block *trade_arenas(struct memory *memory, struct lane *lane, int64_t nbytes, bool is_small)
{
    bool was_there = false;
    for (struct lane *each = memory->devices[lane->device].lanes; each != NULL; each = each->next)
        was_there = give_arena(memory, each) || was_there;
    return was_there ? add_segment(memory, lane, round_pages(nbytes), is_small) : NULL;
}

/* Memory that nobody uses goes back to the device, so that it can be taken in other pieces. */
static struct block *take_by_force(struct memory *memory, struct lane *lane, int64_t nbytes, int64_t segment_bytes)
{
    struct device *device = &memory->devices[lane->device];
    bool is_small = nbytes <= SMALL_BYTES;
    release_passed(memory, true);
    struct block *block = find_free(lane, nbytes, is_small);
    if (block == NULL && is_small)
        block = find_free(lane, nbytes, false);
    if (block == NULL) {
        give_segments(memory, lane->device);
        block = add_segment(memory, lane, segment_bytes, is_small);
    }
    if (block == NULL && segment_bytes > round_pages(nbytes))
        block = add_segment(memory, lane, round_pages(nbytes), is_small);
    /* Of arenas, what fits between the blocks of a step; outside of steps rather a whole one, as blocks may stay long. */
    for (int turn = 0; turn < 2 && block == NULL; turn++)
        block = (turn == 0) == device->is_in_step ? take_gap(memory, lane, nbytes)
                                                  : trade_arenas(memory, lane, nbytes, is_small);
    device->counts.retries += block != NULL;
    return block;
}

/* A block of `nbytes`, a multiple of 512, in no tree; NULL if there is no room. */
struct block *take_from_pool(struct memory *memory, struct lane *lane, int64_t nbytes)
{
    bool is_small = nbytes <= SMALL_BYTES;
    struct block *block = find_free(lane, nbytes, is_small);
    if (block == NULL) {
        int64_t segment_bytes = is_small ? PAGE_BYTES : nbytes < LEAST_OWN_BYTES ? SEGMENT_BYTES : round_pages(nbytes);
        block = add_segment(memory, lane, segment_bytes, is_small);
        if (block == NULL)
            block = take_by_force(memory, lane, nbytes, segment_bytes);
        if (block == NULL || block->is_in_arena)
            return block;
    }
    struct block *rest = block->nbytes > nbytes ? make_block(memory) : NULL;
    if (rest != NULL) { /* where there is no room to write the rest down, it stays with the block */
        rest->address = block->address + (uintptr_t)nbytes;
        rest->nbytes = block->nbytes - nbytes;
        rest->segment = block->segment;
        rest->lane = lane;
        rest->is_small = block->is_small;
        rest->before = block;
        rest->after = block->after;
        if (rest->after != NULL)
            rest->after->before = rest;
        block->after = rest;
        block->nbytes = nbytes;
        put(find_tree(rest), rest, rest->nbytes);
    }
    return block;
}

/* Adds the free block after another one to it. */
static void join(struct memory *memory, struct block *block)
{
    struct block *other = block->after;
    block->nbytes += other->nbytes;
    block->after = other->after;
    if (block->after != NULL)
        block->after->before = block;
    drop_block(memory, other);
}

/* A live block that nobody works on any more is free again. */
void release(struct memory *memory, struct block *block)
{
    struct lane *lane = block->lane;
    pull(&memory->live, block);
    if (block->is_in_arena) {
        lane->arena_blocks--;
        drop_block(memory, block);
        return;
    }
    block->state = FREE;
    if (block->after != NULL && block->after->state == FREE) {
        pull(find_tree(block->after), block->after);
        join(memory, block);
    }
    if (block->before != NULL && block->before->state == FREE) {
        block = block->before;
        pull(find_tree(block), block);
        join(memory, block);
    }
    put(find_tree(block), block, block->nbytes);
}
