"""The part of the runtime that is written in C++: the allocator that counts, and its arena."""
