/* Blocks, and trees of them: treaps, whose nodes have random priorities, so that they are about as flat as they can be. */

#include "parts.h"

#include <stdlib.h>

#define CHUNK_BLOCKS 256

struct chunk {
    struct chunk *next;
    struct block blocks[CHUNK_BLOCKS];
};

struct block *make_block(struct memory *memory)
{
    if (memory->unused == NULL) {
        struct chunk *chunk = calloc(1, sizeof *chunk);
        if (chunk == NULL)
            return NULL;
        chunk->next = memory->chunks;
        memory->chunks = chunk;
        for (int index = 0; index < CHUNK_BLOCKS; index++) {
            chunk->blocks[index].next = memory->unused;
            memory->unused = &chunk->blocks[index];
        }
    }
    struct block *block = memory->unused;
    memory->unused = block->next;
    uint32_t chance = memory->chance; /* xorshift */
    chance ^= chance << 13;
    chance ^= chance >> 17;
    chance ^= chance << 5;
    memory->chance = chance;
    *block = (struct block){.priority = chance};
    return block;
}

void drop_block(struct memory *memory, struct block *block)
{
    block->next = memory->unused;
    memory->unused = block;
}

void drop_chunks(struct memory *memory)
{
    while (memory->chunks != NULL) {
        struct chunk *chunk = memory->chunks;
        memory->chunks = chunk->next;
        free(chunk);
    }
}

static bool is_below(const struct block *block, int64_t key, uintptr_t address)
{
    return block->key != key ? block->key < key : block->address < address;
}

void put(struct block **tree, struct block *block, int64_t key)
{
    block->key = key;
    while (*tree != NULL && (*tree)->priority >= block->priority)
        tree = is_below(*tree, key, block->address) ? &(*tree)->right : &(*tree)->left;
    struct block *rest = *tree, **low = &block->left, **high = &block->right;
    *tree = block;
    while (rest != NULL) {
        if (is_below(rest, key, block->address)) {
            *low = rest;
            low = &rest->right;
            rest = *low;
        } else {
            *high = rest;
            high = &rest->left;
            rest = *high;
        }
    }
    *low = *high = NULL;
}

void pull(struct block **tree, struct block *block)
{
    while (*tree != block)
        tree = is_below(*tree, block->key, block->address) ? &(*tree)->right : &(*tree)->left;
    struct block *low = block->left, *high = block->right;
    while (low != NULL && high != NULL) {
        if (low->priority >= high->priority) {
            *tree = low;
            tree = &low->right;
            low = *tree;
        } else {
            *tree = high;
            tree = &high->left;
            high = *tree;
        }
    }
    *tree = low != NULL ? low : high;
}

struct block *find_above(struct block *tree, int64_t key, uintptr_t address)
{
    struct block *found = NULL;
    while (tree != NULL) {
        if (is_below(tree, key, address)) {
            tree = tree->right;
        } else {
            found = tree;
            tree = tree->left;
        }
    }
    return found;
}

struct block *find_below(struct block *tree, int64_t key, uintptr_t address)
{
    struct block *found = NULL;
    while (tree != NULL) {
        if (is_below(tree, key, address) || (tree->key == key && tree->address == address)) {
            found = tree;
            tree = tree->right;
        } else {
            tree = tree->left;
        }
    }
    return found;
}
