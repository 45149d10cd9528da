/* How members of a mock communicator reach each other: a socket between each two. */
#ifndef MOCK_WIRE_H
#define MOCK_WIRE_H

#include <stddef.h>
#include <stdint.h>

/* Some bytes that go out of, or come in by, a socket. */
typedef struct {
    int fd;
    int out;
    char *at;
    size_t left;
} move;

enum { WIRE_DONE = 0, WIRE_TIMEOUT = 1, WIRE_CLOSED = 2 };

/* Do all moves at once; those of one socket and direction in their order. */
int wire_move(move *moves, int count, double seconds);

/* Join each member to each other; fds by member, -1 for itself.
 * `name` is the same for all members, and no other communicator of the machine has it. */
int wire_join(const char *name, uint32_t size, uint32_t member, int *fds, double seconds);
double wire_now(void);

#endif
