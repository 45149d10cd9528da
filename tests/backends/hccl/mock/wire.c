/* Sockets of the host between the members of a communicator, and bytes through several at once. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "wire.h"

double wire_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whether an earlier move of the same socket and direction has yet to end. */
static int is_behind(const move *moves, int index) {
    for (int i = 0; i < index; i++)
        if (moves[i].left && moves[i].fd == moves[index].fd && moves[i].out == moves[index].out)
            return 1;
    return 0;
}

static int advance(move *self) {
    while (self->left) {
        ssize_t done = self->out ? send(self->fd, self->at, self->left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                 : recv(self->fd, self->at, self->left, MSG_DONTWAIT);
        if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return WIRE_DONE;
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return WIRE_CLOSED;
        self->at += done;
        self->left -= (size_t)done;
    }
    return WIRE_DONE;
}

int wire_move(move *moves, int count, double seconds) {
    double deadline = wire_now() + seconds;
    struct pollfd *polled = calloc((size_t)count + 1, sizeof *polled);
    int result = WIRE_DONE;
    for (;;) {
        int waiting = 0;
        for (int i = 0; i < count && result == WIRE_DONE; i++) {
            if (!moves[i].left || is_behind(moves, i)) continue;
            result = advance(&moves[i]);
            if (!moves[i].left) continue;
            polled[waiting].fd = moves[i].fd;
            polled[waiting++].events = moves[i].out ? POLLOUT : POLLIN;
        }
        int left = 0;
        for (int i = 0; i < count; i++) left += moves[i].left > 0;
        if (result != WIRE_DONE || !left) break;
        if (wire_now() > deadline) {
            result = WIRE_TIMEOUT;
            break;
        }
        poll(polled, (nfds_t)waiting, 50);
    }
    free(polled);
    return result;
}

/* An address without a file: no folder has to exist or be short, and the end of a process frees it. */
static socklen_t address_of(struct sockaddr_un *address, const char *name, uint32_t member) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "%.90s-%u", name,
                          member);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int dial(const char *name, uint32_t peer, double deadline) {
    struct sockaddr_un address;
    socklen_t length = address_of(&address, name, peer);
    while (wire_now() < deadline) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && connect(fd, (struct sockaddr *)&address, length) == 0) return fd;
        if (fd >= 0) close(fd);
        usleep(2000);
    }
    return -1;
}

int wire_join(const char *name, uint32_t size, uint32_t member, int *fds, double seconds) {
    double deadline = wire_now() + seconds;
    struct sockaddr_un address;
    socklen_t length = address_of(&address, name, member);
    int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(door, (struct sockaddr *)&address, length) || listen(door, (int)size)) {
        close(door);
        return WIRE_CLOSED;
    }
    int result = WIRE_DONE;
    for (uint32_t i = 0; i < size; i++) fds[i] = -1;
    for (uint32_t peer = 0; peer < member && result == WIRE_DONE; peer++) {
        fds[peer] = dial(name, peer, deadline);
        uint32_t hello[2] = {member, size};
        if (fds[peer] < 0) result = WIRE_TIMEOUT;
        else if (send(fds[peer], hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello)
            result = WIRE_CLOSED;
    }
    for (uint32_t left = size - member - 1; left > 0 && result == WIRE_DONE; left--) {
        struct pollfd polled = {.fd = door, .events = POLLIN};
        int wait = (int)(1000 * (deadline - wire_now()));
        if (wait <= 0 || poll(&polled, 1, wait) <= 0) {
            result = WIRE_TIMEOUT;
            break;
        }
        int fd = accept4(door, NULL, NULL, SOCK_CLOEXEC);
        uint32_t hello[2] = {0, 0};
        move in = {.fd = fd, .at = (char *)hello, .left = sizeof hello};
        result = wire_move(&in, 1, deadline - wire_now());
        if (result == WIRE_DONE && (hello[1] != size || hello[0] >= size)) result = WIRE_CLOSED;
        if (result == WIRE_DONE) fds[hello[0]] = fd;
    }
    close(door);
    return result;
}
