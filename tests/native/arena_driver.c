/* Millions of random requests to the arena's library, each block filled and looked at again.

   usage: driver REQUESTS THREADS SEED CAPACITY_BYTES [planned | pool | malloc | nothing]

   Thread 0 runs steps on stream 1: a few scripts, repeated with planned offsets, mostly true to the script, sometimes
   with requests that are left out, added or changed, and blocks that are given back too late. The others take and give at
   random, on streams of their own and on stream 1. Every 512 bytes of a block are marked with the block and its stream;
   a mark that has changed means that two blocks lay upon each other, and one that a fresh block finds of another stream
   means that memory changed streams without a wait. Prints what was counted, as JSON; ends with 1 where something is
   wrong. The last argument is for taking times: blocks are not touched, steps are true to their scripts, and requests go
   to planned addresses, to the pool alone, to malloc, or to nobody, which is what the driver itself takes. */

#define _GNU_SOURCE
#include "memory.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define UNIT 512
#define SCRIPTS 3
#define MOST_LINES 400
#define MOST_HELD 600
#define MOST_MARKS 256

static struct memory *memory;
static int64_t total, threads, capacity;
static int is_touched = 1, is_planned = 1, is_ours = 1, is_plain = 0;

struct held {
    char *address;
    int64_t nbytes, mark;
    int stream;
    int64_t due; /* given back before this request of the step, or of the next one */
};

struct worker {
    uint64_t chance;
    int number;
    int64_t requests, refused, serial;
    pthread_t thread;
};

static uint64_t draw(struct worker *worker, uint64_t below)
{
    worker->chance ^= worker->chance << 13;
    worker->chance ^= worker->chance >> 7;
    worker->chance ^= worker->chance << 17;
    return worker->chance % below;
}

static void fail(const char *what, const struct held *held)
{
    fprintf(stderr, "%s: block %p of %" PRId64 " bytes on stream %d\n", what, (void *)held->address, held->nbytes,
            held->stream);
    exit(1);
}

/* Marks: which block, and in the low byte its stream ---------------------------------------------------------------- */

static int64_t count_marks(int64_t nbytes)
{
    int64_t units = nbytes / UNIT;
    return units < MOST_MARKS ? units : MOST_MARKS;
}

/* Where the marks of large blocks are: spread, the first and last unit among them. */
static int64_t *find_mark(const struct held *held, int64_t index)
{
    int64_t units = held->nbytes / UNIT, marks = count_marks(held->nbytes);
    int64_t unit = marks == units ? index : index * (units - 1) / (marks - 1);
    return (int64_t *)(held->address + unit * UNIT);
}

static void fill(struct worker *worker, struct held *held)
{
    held->mark = ((++worker->serial * 64 + worker->number) << 8) | held->stream;
    for (int64_t index = 0; index < count_marks(held->nbytes); index++) {
        int64_t *mark = find_mark(held, index);
        if (*mark != 0 && (*mark & 255) != held->stream)
            fail("memory of another stream", held);
        *mark = held->mark;
    }
}

static void look(const struct held *held)
{
    for (int64_t index = 0; index < count_marks(held->nbytes); index++)
        if (*find_mark(held, index) != held->mark)
            fail("two blocks lie upon each other", held);
}

static int take(struct worker *worker, struct held *held, int64_t nbytes, int stream, int64_t due)
{
    held->address = is_ours    ? memory_take(memory, nbytes, 0, (void *)(intptr_t)stream)
                    : is_plain ? malloc((size_t)nbytes)
                               : (char *)held;
    held->nbytes = (nbytes + UNIT - 1) / UNIT * UNIT;
    held->stream = stream;
    held->due = due;
    worker->requests++;
    if (held->address == NULL) {
        worker->refused++;
        return 0;
    }
    if ((uintptr_t)held->address % UNIT != 0 && is_ours)
        fail("not aligned", held);
    if (is_touched)
        fill(worker, held);
    return 1;
}

static void give(struct held *held)
{
    if (is_touched)
        look(held);
    if (is_plain)
        free(held->address);
    else if (is_ours && memory_give(memory, held->address) != 0)
        fail("not known", held);
}

static int64_t draw_bytes(struct worker *worker)
{
    uint64_t kind = draw(worker, 100);
    if (kind < 60)
        return 1 + (int64_t)draw(worker, 8 << 10);
    if (kind < 95)
        return 1 + (int64_t)draw(worker, 256 << 10);
    return 1 + (int64_t)draw(worker, 3 << 20);
}

/* Steps ------------------------------------------------------------------------------------------------------------ */

struct script {
    int64_t count, nbytes;
    int64_t sizes[MOST_LINES], offsets[MOST_LINES], ends[MOST_LINES]; /* ends beyond `count` are in the next step */
};

static int overlaps(const struct script *script, int64_t one, int64_t other)
{
    for (int64_t turn = -1; turn <= 1; turn++) {
        int64_t shift = turn * script->count;
        if (one < script->ends[other] + shift && other + shift < script->ends[one])
            return 1;
    }
    return 0;
}

/* First fit over lifetimes, so that offsets are as close as a plan's. */
static void write_script(struct worker *worker, struct script *script)
{
    script->count = 50 + (int64_t)draw(worker, MOST_LINES - 50);
    script->nbytes = 0;
    for (int64_t line = 0; line < script->count; line++) {
        script->sizes[line] = (draw_bytes(worker) + UNIT - 1) / UNIT * UNIT;
        int64_t life = draw(worker, 10) < 7 ? 1 + (int64_t)draw(worker, 12) : 1 + (int64_t)draw(worker, 300);
        script->ends[line] = line + (life < script->count ? life : script->count);
        int64_t offset = draw(worker, 40) == 0 ? -1 : 0;
        for (int64_t other = 0; offset >= 0 && other < line; other++) {
            int64_t begin = script->offsets[other];
            if (begin >= 0 && overlaps(script, line, other) && offset < begin + script->sizes[other] &&
                begin < offset + script->sizes[line]) {
                offset = begin + script->sizes[other];
                other = -1;
            }
        }
        script->offsets[line] = offset;
        if (offset >= 0 && offset + script->sizes[line] > script->nbytes)
            script->nbytes = offset + script->sizes[line];
    }
    if (is_planned && memory_plan(memory, 0, (void *)1, script->count, script->sizes, script->offsets, script->nbytes) != 0)
        abort();
}

static int64_t give_due(struct worker *worker, struct held *blocks, int64_t count, int64_t now, int is_late)
{
    for (int64_t index = 0; index < count;) {
        if (blocks[index].due > now || (is_late && draw(worker, 4) == 0)) {
            index++;
        } else {
            give(&blocks[index]);
            blocks[index] = blocks[--count];
        }
    }
    return count;
}

static void run_steps(struct worker *worker)
{
    static struct script scripts[SCRIPTS];
    static struct held blocks[2 * MOST_LINES + MOST_HELD];
    int64_t count = 0;
    for (int number = 0; number < SCRIPTS; number++)
        write_script(worker, &scripts[number]);
    struct script *script = scripts;
    for (int64_t step = 0; worker->requests < total / threads; step++) {
        if (step % 64 == 63)
            script = &scripts[draw(worker, SCRIPTS)];
        if (is_touched && step % 997 == 996)
            write_script(worker, script);
        int deviates = is_touched && draw(worker, 8) == 0;
        if (memory_begin_step(memory, 0) != 0 || (deviates && memory_begin_step(memory, 0) != -1))
            abort();
        for (int64_t line = 0; line < script->count; line++) {
            count = give_due(worker, blocks, count, line, deviates);
            if (deviates && draw(worker, 50) == 0)
                continue; /* left out */
            int64_t nbytes = script->sizes[line];
            if (deviates && draw(worker, 50) == 0)
                nbytes = draw_bytes(worker); /* changed */
            count += take(worker, &blocks[count], nbytes, 1, script->ends[line]);
            if (deviates && draw(worker, 50) == 0 && count < 2 * MOST_LINES) /* added */
                count += take(worker, &blocks[count], draw_bytes(worker), 1, line + 3);
            if (deviates && draw(worker, 500) == 0)
                break; /* an exception */
        }
        count = give_due(worker, blocks, count, script->count, 0);
        if (memory_end_step(memory, 0) != 0)
            abort();
        for (int64_t index = 0; index < count; index++)
            blocks[index].due -= script->count;
        if (is_touched && step % 31 == 30)
            memory_empty(memory, step % 2 ? 0 : -1);
        if (is_touched && step % 211 == 210 && memory_check(memory) != 0)
            abort();
        if (count > 2 * MOST_LINES)
            count = give_due(worker, blocks, count, INT64_MAX, 0);
    }
    give_due(worker, blocks, count, INT64_MAX, 0);
}

static void *run_random(void *given)
{
    struct worker *worker = given;
    struct held blocks[MOST_HELD];
    int64_t count = 0;
    while (worker->requests < total / threads) {
        if (count == MOST_HELD || (count > 0 && draw(worker, 100) < 50)) {
            int64_t index = (int64_t)draw(worker, (uint64_t)count);
            give(&blocks[index]);
            blocks[index] = blocks[--count];
        } else {
            int stream = draw(worker, 40) == 0 ? 1 : 2 + worker->number;
            count += take(worker, &blocks[count], draw_bytes(worker), stream, 0);
        }
        uint64_t chance = draw(worker, 10000);
        if (chance == 0 && memory_give(memory, (void *)(uintptr_t)(64 + draw(worker, 1000))) != -1)
            abort();
        if (chance == 1)
            memory_record(memory, 0, (int)draw(worker, 2));
        if (chance == 2) {
            struct event events[64];
            memory_drain(memory, 0, events, 64);
        }
        if (chance == 3 && memory_take(memory, INT64_C(1) << 62, 0, NULL) != NULL)
            abort();
        if (chance == 4 && count > 0)
            memory_use(memory, blocks[draw(worker, (uint64_t)count)].address, (void *)99);
        if (chance == 5)
            memory_reset_peaks(memory, 0);
    }
    while (count > 0)
        give(&blocks[--count]);
    return NULL;
}

int main(int given, char **arguments)
{
    if (given < 5)
        return 2;
    total = atoll(arguments[1]);
    threads = atoll(arguments[2]);
    capacity = atoll(arguments[4]);
    is_touched = given < 6;
    is_planned = is_touched || strcmp(arguments[5], "planned") == 0;
    is_plain = !is_touched && strcmp(arguments[5], "malloc") == 0;
    is_ours = is_planned || strcmp(arguments[5], "pool") == 0;
    memory = memory_open_host(capacity);
    struct worker workers[16] = {{0}};
    struct timespec begin, end;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    for (int number = 0; number < threads; number++) {
        workers[number].chance = (uint64_t)atoll(arguments[3]) * 1000003 + (uint64_t)number * 7919 + 88172645463325252u;
        workers[number].number = number;
        if (number > 0)
            pthread_create(&workers[number].thread, NULL, run_random, &workers[number]);
    }
    run_steps(&workers[0]);
    int64_t requests = workers[0].requests, refused = workers[0].refused;
    for (int number = 1; number < threads; number++) {
        pthread_join(workers[number].thread, NULL);
        requests += workers[number].requests;
        refused += workers[number].refused;
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    struct counts counts;
    memory_count(memory, 0, &counts);
    int wrong = memory_check(memory);
    memory_empty(memory, -1);
    struct counts after;
    memory_count(memory, 0, &after);
    int64_t left = memory_close(memory);
    double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    printf("{\"requests\": %" PRId64 ", \"refused\": %" PRId64 ", \"hits\": %" PRId64 ", \"missed\": %" PRId64
           ", \"blocked\": %" PRId64 ", \"apart\": %" PRId64 ", \"failed\": %" PRId64 ", \"retries\": %" PRId64
           ", \"unknown\": %" PRId64 ", \"seconds\": %.3f, \"wrong\": %d, \"left\": %" PRId64
           ", \"reserved_bytes\": %" PRId64 "}\n",
           requests, refused, counts.hits, counts.missed, counts.blocked, counts.apart, counts.failed, counts.retries,
           counts.unknown, seconds, wrong, left, after.reserved_bytes);
    return wrong != 0 || left != 0 || after.reserved_bytes != 0 || after.allocated_bytes != 0;
}
