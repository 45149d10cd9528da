/* Streams as queues that a thread each works off in order, and events as marks in them. */
#include <pthread.h>
#include <stdlib.h>

#include "runtime.h"

#define STREAM_MAGIC 0x5354524dU
#define EVENT_MAGIC 0x45564e54U

typedef struct task {
    HcclResult (*work)(void *);
    void *argument;
    struct task *next;
} task;

typedef struct {
    uint32_t magic;
    pthread_mutex_t lock;
    pthread_cond_t more;
    task *first, *last;
} stream;

typedef struct {
    uint32_t magic;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint64_t recorded, reached;
} event;

typedef struct {
    event *event;
    uint64_t mark;
} mark;

static HcclResult device_error = HCCL_SUCCESS;
static pthread_mutex_t error_lock = PTHREAD_MUTEX_INITIALIZER;

HcclResult mock_device_error(void) {
    pthread_mutex_lock(&error_lock);
    HcclResult found = device_error;
    pthread_mutex_unlock(&error_lock);
    return found;
}

static void fail_device(HcclResult error) {
    pthread_mutex_lock(&error_lock);
    if (device_error == HCCL_SUCCESS) device_error = error;
    pthread_mutex_unlock(&error_lock);
}

static void *run(void *argument) {
    stream *self = argument;
    for (;;) {
        pthread_mutex_lock(&self->lock);
        while (self->first == NULL) pthread_cond_wait(&self->more, &self->lock);
        task *next = self->first;
        self->first = next->next;
        if (self->first == NULL) self->last = NULL;
        pthread_mutex_unlock(&self->lock);
        HcclResult result = next->work(next->argument);
        if (result != HCCL_SUCCESS) fail_device(result);
        free(next);
    }
    return NULL;
}

aclrtStream mockStreamCreate(void) {
    stream *self = calloc(1, sizeof *self);
    self->magic = STREAM_MAGIC;
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->more, NULL);
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, self) != 0) abort();
    pthread_detach(thread);
    return self;
}

int mock_is_stream(aclrtStream found) {
    return found != NULL && (uintptr_t)found % sizeof(void *) == 0 &&
           ((stream *)found)->magic == STREAM_MAGIC;
}

void mock_enqueue(aclrtStream target, HcclResult (*work)(void *), void *argument) {
    stream *self = target;
    task *added = calloc(1, sizeof *added);
    added->work = work;
    added->argument = argument;
    pthread_mutex_lock(&self->lock);
    if (self->last == NULL) self->first = added;
    else self->last->next = added;
    self->last = added;
    pthread_cond_signal(&self->more);
    pthread_mutex_unlock(&self->lock);
}

void *mockEventCreate(void) {
    event *self = calloc(1, sizeof *self);
    self->magic = EVENT_MAGIC;
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->moved, NULL);
    return self;
}

static HcclResult reach(void *argument) {
    mark *found = argument;
    pthread_mutex_lock(&found->event->lock);
    if (found->mark > found->event->reached) found->event->reached = found->mark;
    pthread_cond_broadcast(&found->event->moved);
    pthread_mutex_unlock(&found->event->lock);
    free(found);
    return HCCL_SUCCESS;
}

static HcclResult await(void *argument) {
    mark *found = argument;
    pthread_mutex_lock(&found->event->lock);
    while (found->event->reached < found->mark)
        pthread_cond_wait(&found->event->moved, &found->event->lock);
    pthread_mutex_unlock(&found->event->lock);
    free(found);
    return HCCL_SUCCESS;
}

static mark *mark_of(event *self, int move) {
    mark *found = calloc(1, sizeof *found);
    found->event = self;
    pthread_mutex_lock(&self->lock);
    if (move) self->recorded++;
    found->mark = self->recorded;
    pthread_mutex_unlock(&self->lock);
    return found;
}

int mockEventRecord(void *marked, aclrtStream target) {
    mock_enqueue(target, reach, mark_of(marked, 1));
    return (int)mock_device_error();
}

int mockStreamWaitEvent(aclrtStream target, void *awaited) {
    mock_enqueue(target, await, mark_of(awaited, 0));
    return (int)mock_device_error();
}

int mockEventQuery(void *asked) {
    event *self = asked;
    if (mock_device_error() != HCCL_SUCCESS) return -1;
    pthread_mutex_lock(&self->lock);
    int passed = self->reached >= self->recorded;
    pthread_mutex_unlock(&self->lock);
    return passed;
}

int mockEventSynchronize(void *awaited) {
    await(mark_of(awaited, 0));
    return (int)mock_device_error();
}

int mockStreamSynchronize(aclrtStream target) {
    event *end = mockEventCreate();
    mockEventRecord(end, target);
    int error = mockEventSynchronize(end);
    free(end);
    return error;
}
