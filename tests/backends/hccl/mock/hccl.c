/* A library with HCCL's interface for host memory, which moves bytes between processes, and holds
 * callers to the documented rules: what breaks one is refused, and said on standard error. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime.h"
#include "wire.h"

#define COMM_MAGIC 0x48434f4dU
#define ROOT_MAGIC 0x48524f4f54494e46ULL
#define ITEMS 16

/* -- what tests ask, and how misuse is said ------------------------------------------------- */

static char last_error[512] = "";
static pthread_mutex_t said = PTHREAD_MUTEX_INITIALIZER;

#define FUNCTIONS 16
static struct {
    const char *name;
    uint64_t calls;
} counted[FUNCTIONS];

static void count_call(const char *name) {
    pthread_mutex_lock(&said);
    for (int i = 0; i < FUNCTIONS; i++) {
        if (counted[i].name != NULL && strcmp(counted[i].name, name)) continue;
        counted[i].name = name;
        counted[i].calls++;
        break;
    }
    pthread_mutex_unlock(&said);
}

uint64_t mockCalls(const char *name) {
    for (int i = 0; i < FUNCTIONS && counted[i].name != NULL; i++)
        if (!strcmp(counted[i].name, name)) return counted[i].calls;
    return 0;
}

const char *mockLastError(void) { return last_error; }

static HcclResult refuse(HcclResult code, const char *format, ...) {
    va_list arguments;
    pthread_mutex_lock(&said);
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    fprintf(stderr, "mock hccl: %s\n", last_error);
    pthread_mutex_unlock(&said);
    return code;
}

const char *HcclGetErrorString(HcclResult code) {
    switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_PTR: return "empty pointer";
    case HCCL_E_MEMORY: return "memory error";
    case HCCL_E_INTERNAL: return "internal error";
    case HCCL_E_NOT_SUPPORT: return "not support feature";
    case HCCL_E_UNAVAIL: return "resource unavailable";
    case HCCL_E_SYSCALL: return "system call error";
    case HCCL_E_TIMEOUT: return "timeout";
    case HCCL_E_REMOTE: return "communication operation remote error";
    }
    return "unknown error";
}

/* -- communicators -------------------------------------------------------------------------- */

typedef struct {
    uint64_t magic, number;
    char name[96];
} root;

typedef struct {
    uint32_t magic, size, rank;
    int *fds;
    uint64_t sequence;
    int pending;
    HcclResult error;
    pthread_mutex_t turn;
} communicator;

static uint64_t open_root = 0; /* one that this process has made and nobody has joined yet */
static uint64_t roots = 0;

static double seconds_of(const char *variable, double otherwise) {
    const char *text = getenv(variable);
    return text != NULL && *text ? atof(text) : otherwise;
}

HcclResult HcclGetRootInfo(HcclRootInfo *info) {
    count_call(__func__);
    if (info == NULL) return refuse(HCCL_E_PTR, "HcclGetRootInfo: no memory for the root info");
    if (open_root)
        return refuse(HCCL_E_UNAVAIL,
                      "HcclGetRootInfo: the port is bound: a communicator is being joined");
    memset(info->internal, 0x5a, sizeof info->internal);
    root made = {.magic = ROOT_MAGIC, .number = ++roots};
    snprintf(made.name, sizeof made.name, "hccl-%d-%lu", (int)getpid(), (unsigned long)made.number);
    memcpy(info->internal, &made, sizeof made);
    open_root = made.number;
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo *info, uint32_t rank,
                                HcclComm *comm) {
    count_call(__func__);
    if (info == NULL || comm == NULL)
        return refuse(HCCL_E_PTR, "HcclCommInitRootInfo: an argument is NULL");
    if (size < 1 || size > 4096 || rank >= size)
        return refuse(HCCL_E_PARA, "HcclCommInitRootInfo: rank %u of %u", rank, size);
    root given;
    memcpy(&given, info->internal, sizeof given);
    if (given.magic != ROOT_MAGIC)
        return refuse(HCCL_E_PARA, "HcclCommInitRootInfo: this is no root info");
    for (size_t i = sizeof given; i < sizeof info->internal; i++)
        if (info->internal[i] != 0x5a)
            return refuse(HCCL_E_PARA, "HcclCommInitRootInfo: the root info is cut off at byte %zu",
                          i);
    communicator *made = calloc(1, sizeof *made);
    *made = (communicator){.magic = COMM_MAGIC, .size = size, .rank = rank};
    made->fds = calloc(size, sizeof *made->fds);
    pthread_mutex_init(&made->turn, NULL);
    double seconds = seconds_of("MOCK_HCCL_CONNECT_SECONDS", 60);
    int joined = wire_join(given.name, size, rank, made->fds, seconds);
    if (rank == 0) open_root = 0;
    if (joined != WIRE_DONE)
        return refuse(joined == WIRE_TIMEOUT ? HCCL_E_TIMEOUT : HCCL_E_PARA,
                      "HcclCommInitRootInfo: rank %u of %u: %s", rank, size,
                      joined == WIRE_TIMEOUT ? "the others have not come" : "sizes do not agree");
    *comm = made;
    return HCCL_SUCCESS;
}

static communicator *comm_of(HcclComm given, const char *function) {
    communicator *self = given;
    if (self != NULL && (uintptr_t)given % sizeof(void *) == 0 && self->magic == COMM_MAGIC)
        return self;
    refuse(HCCL_E_PTR, "%s: the communicator is none, or has been destroyed", function);
    return NULL;
}

HcclResult HcclCommDestroy(HcclComm comm) {
    count_call(__func__);
    communicator *self = comm_of(comm, __func__);
    if (self == NULL) return HCCL_E_PTR;
    if (__atomic_load_n(&self->pending, __ATOMIC_SEQ_CST))
        return refuse(HCCL_E_INTERNAL, "HcclCommDestroy: operations are under way");
    for (uint32_t i = 0; i < self->size; i++)
        if (self->fds[i] >= 0) close(self->fds[i]);
    self->magic = 0; /* the memory stays, so that a later use is seen */
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t *size) {
    communicator *self = comm_of(comm, __func__);
    if (self == NULL || size == NULL) return HCCL_E_PTR;
    *size = self->size;
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank) {
    communicator *self = comm_of(comm, __func__);
    if (self == NULL || rank == NULL) return HCCL_E_PTR;
    *rank = self->rank;
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *error) {
    communicator *self = comm_of(comm, __func__);
    if (self == NULL || error == NULL) return HCCL_E_PTR;
    *error = __atomic_load_n(&self->error, __ATOMIC_SEQ_CST);
    return HCCL_SUCCESS;
}

/* -- operations: what they are, and what each member tells the others of its own ------------ */

typedef enum { MESSAGES = 1, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST } kind;
static const char *kinds[] = {"", "send/receive", "AllReduce", "ReduceScatter", "AllGather",
                              "Broadcast"};

typedef struct {
    uint32_t receives, type;
    uint64_t count;
} item_head;

typedef struct {
    uint32_t kind, type, op, root;
    uint64_t sequence, count;
    uint32_t items, unused;
    item_head item[ITEMS];
} head;

typedef struct {
    communicator *comm;
    const char *function;
    head head;
    char *source, *target;
    uint32_t items;
    uint64_t turn; /* among the sends and receives of this process; 0 for anything else */
    HcclSendRecvItem item[];
} operation;

static size_t width_of(HcclDataType type) {
    static const size_t widths[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
    return (unsigned)type < sizeof widths / sizeof *widths ? widths[type] : 0;
}

static HcclResult fail(operation *self, HcclResult code, const char *why) {
    communicator *comm = self->comm;
    __atomic_store_n(&comm->error, code, __ATOMIC_SEQ_CST);
    return refuse(code, "rank %u of %u: %s: %s", comm->rank, comm->size, self->function, why);
}

static HcclResult transfer(operation *self, move *moves, int count) {
    int done = wire_move(moves, count, seconds_of("HCCL_EXEC_TIMEOUT", 60));
    if (done == WIRE_TIMEOUT)
        return fail(self, HCCL_E_TIMEOUT, "the other rank has not come: the operation has no pair");
    return done == WIRE_DONE ? HCCL_SUCCESS : fail(self, HCCL_E_REMOTE, "the other rank has gone");
}

/* -- messages ------------------------------------------------------------------------------- */

static void describe(operation *self, uint32_t peer, head *mine) {
    *mine = self->head;
    mine->items = 0;
    for (uint32_t i = 0; i < self->items; i++) {
        HcclSendRecvItem *item = &self->item[i];
        if (item->remoteRank != peer) continue;
        mine->item[mine->items++] = (item_head){.receives = item->sendRecvType == HCCL_RECV,
                                                .type = (uint32_t)item->dataType,
                                                .count = item->count};
    }
}

/* The n-th send of one is the n-th receive of the other. */
static const char *unpaired(const head *mine, const head *theirs, int receives) {
    uint32_t other = 0;
    for (uint32_t i = 0; i < mine->items; i++) {
        if (mine->item[i].receives != (uint32_t)receives) continue;
        while (other < theirs->items && theirs->item[other].receives == (uint32_t)receives) other++;
        if (other == theirs->items) return "the other rank has no operation that pairs with it";
        if (theirs->item[other].count != mine->item[i].count) return "the counts do not agree";
        if (theirs->item[other].type != mine->item[i].type) return "the types do not agree";
        other++;
    }
    while (other < theirs->items && theirs->item[other].receives == (uint32_t)receives) other++;
    return other < theirs->items ? "the other rank expects more operations" : NULL;
}

static HcclResult messages(operation *self) {
    communicator *comm = self->comm;
    uint32_t peers[ITEMS], count = 0;
    head mine[ITEMS], theirs[ITEMS];
    move moves[2 * ITEMS];
    int moving = 0;
    for (uint32_t i = 0; i < self->items; i++) {
        uint32_t known = 0;
        while (known < count && peers[known] != self->item[i].remoteRank) known++;
        if (known == count) peers[count++] = self->item[i].remoteRank;
    }
    for (uint32_t i = 0; i < count; i++) {
        describe(self, peers[i], &mine[i]);
        int fd = comm->fds[peers[i]];
        moves[moving++] = (move){fd, 1, (char *)&mine[i], sizeof mine[i]};
        moves[moving++] = (move){fd, 0, (char *)&theirs[i], sizeof theirs[i]};
    }
    HcclResult result = transfer(self, moves, moving);
    for (uint32_t i = 0; i < count && result == HCCL_SUCCESS; i++) {
        const char *why = theirs[i].kind != MESSAGES ? "the other rank is in a collective" : NULL;
        if (why == NULL) why = unpaired(&mine[i], &theirs[i], 0);
        if (why == NULL) why = unpaired(&mine[i], &theirs[i], 1);
        if (why != NULL) result = fail(self, HCCL_E_REMOTE, why);
    }
    if (result != HCCL_SUCCESS) return result;
    for (uint32_t i = 0; i < self->items; i++) {
        HcclSendRecvItem *item = &self->item[i];
        moves[i] = (move){comm->fds[item->remoteRank], item->sendRecvType == HCCL_SEND, item->buf,
                          item->count * width_of(item->dataType)};
    }
    return transfer(self, moves, (int)self->items);
}

/* -- collectives ---------------------------------------------------------------------------- */

static float from_half(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}

static uint16_t to_half(float value) {
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

static float from_brain(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_brain(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* nearest, ties to even */
}

#define COMBINED(a, b) \
    (op == HCCL_REDUCE_SUM    ? (a) + (b) \
     : op == HCCL_REDUCE_PROD ? (a) * (b) \
     : op == HCCL_REDUCE_MAX  ? ((a) > (b) ? (a) : (b)) \
                              : ((a) < (b) ? (a) : (b)))
#define COMBINE(TYPE, WIDE) \
    for (uint64_t i = 0; i < count; i++) { \
        WIDE a = (WIDE)((TYPE *)total)[i], b = (WIDE)((TYPE *)added)[i]; \
        ((TYPE *)total)[i] = (TYPE)COMBINED(a, b); \
    } \
    break
#define COMBINE_AS(FROM, TO) \
    for (uint64_t i = 0; i < count; i++) { \
        float a = FROM(((uint16_t *)total)[i]), b = FROM(((uint16_t *)added)[i]); \
        ((uint16_t *)total)[i] = TO(COMBINED(a, b)); \
    } \
    break

static void combine(void *total, const void *added, uint64_t count, HcclDataType type,
                    HcclReduceOp op) {
    switch (type) {
    case HCCL_DATA_TYPE_INT8: COMBINE(int8_t, int32_t);
    case HCCL_DATA_TYPE_INT16: COMBINE(int16_t, int32_t);
    case HCCL_DATA_TYPE_INT32: COMBINE(int32_t, int64_t);
    case HCCL_DATA_TYPE_INT64: COMBINE(int64_t, int64_t);
    case HCCL_DATA_TYPE_FP32: COMBINE(float, float);
    case HCCL_DATA_TYPE_FP16: COMBINE_AS(from_half, to_half);
    case HCCL_DATA_TYPE_BFP16: COMBINE_AS(from_brain, to_brain);
    default: abort();
    }
}

static const char *disagreement(const head *mine, const head *theirs) {
    if (theirs->kind != mine->kind || theirs->sequence != mine->sequence)
        return "the ranks are in different operations";
    if (theirs->count != mine->count) return "the counts do not agree";
    if (theirs->type != mine->type) return "the types do not agree";
    if (theirs->op != mine->op) return "the reductions do not agree";
    return theirs->root != mine->root ? "the roots do not agree" : NULL;
}

static HcclResult meet(operation *self) {
    communicator *comm = self->comm;
    head *theirs = calloc(comm->size, sizeof *theirs);
    move *moves = calloc(2 * comm->size, sizeof *moves);
    int moving = 0;
    for (uint32_t peer = 0; peer < comm->size; peer++) {
        if (peer == comm->rank) continue;
        moves[moving++] = (move){comm->fds[peer], 1, (char *)&self->head, sizeof self->head};
        moves[moving++] = (move){comm->fds[peer], 0, (char *)&theirs[peer], sizeof *theirs};
    }
    HcclResult result = transfer(self, moves, moving);
    for (uint32_t peer = 0; peer < comm->size && result == HCCL_SUCCESS; peer++) {
        const char *why = peer == comm->rank ? NULL : disagreement(&self->head, &theirs[peer]);
        if (why != NULL) result = fail(self, HCCL_E_REMOTE, why);
    }
    free(theirs);
    free(moves);
    return result;
}

/* Everybody's source, one behind the other. */
static HcclResult gather(operation *self, char *all, size_t bytes) {
    communicator *comm = self->comm;
    move *moves = calloc(2 * comm->size, sizeof *moves);
    int moving = 0;
    for (uint32_t peer = 0; peer < comm->size; peer++) {
        if (peer == comm->rank) {
            memcpy(all + peer * bytes, self->source, bytes);
            continue;
        }
        moves[moving++] = (move){comm->fds[peer], 1, self->source, bytes};
        moves[moving++] = (move){comm->fds[peer], 0, all + peer * bytes, bytes};
    }
    HcclResult result = transfer(self, moves, moving);
    free(moves);
    return result;
}

static HcclResult reduce(operation *self) {
    uint32_t size = self->comm->size;
    int scatters = self->head.kind == REDUCE_SCATTER;
    uint64_t count = self->head.count * (scatters ? size : 1);
    size_t width = width_of((HcclDataType)self->head.type), bytes = count * width;
    char *all = malloc(bytes * size);
    HcclResult result = gather(self, all, bytes);
    if (result == HCCL_SUCCESS) {
        for (uint32_t peer = 1; peer < size; peer++)
            combine(all, all + peer * bytes, count, (HcclDataType)self->head.type,
                    (HcclReduceOp)self->head.op);
        size_t part = self->head.count * width;
        memcpy(self->target, all + (scatters ? self->comm->rank * part : 0), part);
    }
    free(all);
    return result;
}

static HcclResult broadcast(operation *self) {
    communicator *comm = self->comm;
    size_t bytes = self->head.count * width_of((HcclDataType)self->head.type);
    if (comm->rank != self->head.root) {
        move in = {comm->fds[self->head.root], 0, self->target, bytes};
        return transfer(self, &in, 1);
    }
    move *moves = calloc(comm->size, sizeof *moves);
    int moving = 0;
    for (uint32_t peer = 0; peer < comm->size; peer++)
        if (peer != comm->rank) moves[moving++] = (move){comm->fds[peer], 1, self->source, bytes};
    HcclResult result = transfer(self, moves, moving);
    free(moves);
    return result;
}

static HcclResult carry_out(operation *self) {
    if (self->head.kind == MESSAGES) return messages(self);
    HcclResult result = meet(self);
    if (result != HCCL_SUCCESS) return result;
    if (self->head.kind == BROADCAST) return broadcast(self);
    if (self->head.kind != ALL_GATHER) return reduce(self);
    size_t bytes = self->head.count * width_of((HcclDataType)self->head.type);
    char *all = malloc(bytes * self->comm->size);
    result = gather(self, all, bytes);
    if (result == HCCL_SUCCESS) memcpy(self->target, all, bytes * self->comm->size);
    free(all);
    return result;
}

/* A process that has called HcclSend or HcclRecv gets to the next of these when the other end has
 * come: they have one order, whatever streams and communicators they are on. */
static pthread_mutex_t turns = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static uint64_t last_turn = 0, over = 0;

static HcclResult take_turn(operation *self) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)seconds_of("HCCL_EXEC_TIMEOUT", 60);
    int late = 0;
    pthread_mutex_lock(&turns);
    while (over + 1 != self->turn && !late)
        late = pthread_cond_timedwait(&turned, &turns, &until) == ETIMEDOUT;
    pthread_mutex_unlock(&turns);
    return late ? fail(self, HCCL_E_TIMEOUT, "it is behind a message whose other end has not come")
                : HCCL_SUCCESS;
}

static void end_turn(operation *self) {
    pthread_mutex_lock(&turns);
    if (over + 1 == self->turn) over++;
    pthread_cond_broadcast(&turned);
    pthread_mutex_unlock(&turns);
}

static HcclResult run(void *argument) {
    operation *self = argument;
    communicator *comm = self->comm;
    HcclResult result = mock_device_error(); /* after an error nothing more is done */
    if (result == HCCL_SUCCESS && self->turn) result = take_turn(self);
    pthread_mutex_lock(&comm->turn);
    if (result == HCCL_SUCCESS) result = carry_out(self);
    pthread_mutex_unlock(&comm->turn);
    if (self->turn) end_turn(self);
    __atomic_sub_fetch(&comm->pending, 1, __ATOMIC_SEQ_CST);
    free(self);
    return result;
}

/* -- calls ---------------------------------------------------------------------------------- */

#define CAPTURED 65536
static struct {
    operation *operation;
    aclrtStream stream;
} captured[CAPTURED];
static int capturing = 0, captured_count = 0;

void mockCaptureBegin(void) { capturing = 1; }
void mockCaptureEnd(void) { capturing = 0; }
int mockCaptured(void) { return captured_count; }

static HcclResult enqueue(operation *made, aclrtStream stream) {
    communicator *comm = made->comm;
    if (comm->magic != COMM_MAGIC)
        return refuse(HCCL_E_PTR, "%s: replayed on a communicator that has been destroyed",
                      made->function);
    if (made->head.kind != MESSAGES) made->head.sequence = comm->sequence++;
    if (strcmp(made->function, "HcclSend") == 0 || strcmp(made->function, "HcclRecv") == 0)
        made->turn = ++last_turn;
    __atomic_add_fetch(&comm->pending, 1, __ATOMIC_SEQ_CST);
    mock_enqueue(stream, run, made);
    return HCCL_SUCCESS;
}

void mockReplay(int first, int last) {
    for (int i = first; i < last; i++) {
        size_t bytes = sizeof(operation) + captured[i].operation->items * sizeof(HcclSendRecvItem);
        operation *again = malloc(bytes);
        memcpy(again, captured[i].operation, bytes);
        if (enqueue(again, captured[i].stream) != HCCL_SUCCESS) abort();
    }
}

static HcclResult put(communicator *comm, const char *function, kind what, HcclSendRecvItem *items,
                      uint32_t count, operation like, aclrtStream stream) {
    operation *made = calloc(1, sizeof *made + count * sizeof *items);
    *made = like;
    made->comm = comm;
    made->function = function;
    made->items = count;
    made->head.kind = what;
    if (count) memcpy(made->item, items, count * sizeof *items);
    if (!capturing) return enqueue(made, stream);
    if (captured_count == CAPTURED)
        return refuse(HCCL_E_MEMORY, "%s: too many operations are captured", function);
    captured[captured_count].operation = made;
    captured[captured_count++].stream = stream;
    return HCCL_SUCCESS;
}

static HcclResult check_data(const char *function, const void *data, uint64_t count,
                             HcclDataType type) {
    size_t width = width_of(type);
    if (data == NULL) return refuse(HCCL_E_PTR, "%s: no data", function);
    if (width == 0) return refuse(HCCL_E_PARA, "%s: there is no type %d", function, (int)type);
    if (count == 0 || count > (1ULL << 40))
        return refuse(HCCL_E_PARA, "%s: a count of %llu", function, (unsigned long long)count);
    if ((uintptr_t)data % width)
        return refuse(HCCL_E_PARA, "%s: %p does not lie on a multiple of %zu bytes", function, data,
                      width);
    return HCCL_SUCCESS;
}

static HcclResult check_reduction(const char *function, HcclDataType type, HcclReduceOp op) {
    if ((unsigned)op > HCCL_REDUCE_MIN)
        return refuse(HCCL_E_PARA, "%s: there is no reduction %d", function, (int)op);
    int known = type <= HCCL_DATA_TYPE_INT64 || type == HCCL_DATA_TYPE_BFP16;
    int narrow = type == HCCL_DATA_TYPE_INT16 || type == HCCL_DATA_TYPE_BFP16;
    if (!known || (op == HCCL_REDUCE_PROD && narrow))
        return refuse(HCCL_E_NOT_SUPPORT, "%s: type %d is not reduced by %d", function, (int)type,
                      (int)op);
    return HCCL_SUCCESS;
}

static HcclResult check_item(const char *function, communicator *comm,
                             const HcclSendRecvItem *item) {
    if (item->sendRecvType != HCCL_SEND && item->sendRecvType != HCCL_RECV)
        return refuse(HCCL_E_PARA, "%s: an item is neither send nor receive, but %d", function,
                      (int)item->sendRecvType);
    if (item->remoteRank >= comm->size || item->remoteRank == comm->rank)
        return refuse(HCCL_E_PARA, "%s: rank %u has no peer %u in %u ranks", function, comm->rank,
                      item->remoteRank, comm->size);
    return check_data(function, item->buf, item->count, item->dataType);
}

static HcclResult put_items(const char *function, HcclSendRecvItem *items, uint32_t count,
                            HcclComm given, aclrtStream stream) {
    count_call(function);
    communicator *comm = comm_of(given, function);
    if (comm == NULL) return HCCL_E_PTR;
    if (!mock_is_stream(stream)) return refuse(HCCL_E_PTR, "%s: this is no stream", function);
    if (items == NULL || count < 1 || count > ITEMS)
        return refuse(HCCL_E_PARA, "%s: %u items", function, count);
    for (uint32_t i = 0; i < count; i++) {
        HcclResult checked = check_item(function, comm, &items[i]);
        if (checked != HCCL_SUCCESS) return checked;
        for (uint32_t j = 0; j < i; j++)
            if (items[j].remoteRank == items[i].remoteRank &&
                items[j].sendRecvType == items[i].sendRecvType)
                return refuse(HCCL_E_PARA, "%s: two messages in one direction, with rank %u",
                              function, items[i].remoteRank);
    }
    return put(comm, function, MESSAGES, items, count, (operation){0}, stream);
}

HcclResult HcclSend(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm,
                    aclrtStream stream) {
    HcclSendRecvItem item = {HCCL_SEND, data, count, type, peer};
    return put_items(__func__, &item, 1, comm, stream);
}

HcclResult HcclRecv(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm,
                    aclrtStream stream) {
    HcclSendRecvItem item = {HCCL_RECV, data, count, type, peer};
    return put_items(__func__, &item, 1, comm, stream);
}

#ifndef MOCK_WITHOUT_BATCH
HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm comm,
                             aclrtStream stream) {
    return put_items(__func__, items, count, comm, stream);
}
#endif

static HcclResult put_collective(const char *function, kind what, void *source, void *target,
                                 uint64_t count, HcclDataType type, uint32_t op, uint32_t at,
                                 HcclComm given, aclrtStream stream) {
    count_call(function);
    communicator *comm = comm_of(given, function);
    if (comm == NULL) return HCCL_E_PTR;
    if (!mock_is_stream(stream)) return refuse(HCCL_E_PTR, "%s: this is no stream", function);
    HcclResult checked = check_data(function, source, count, type);
    if (checked == HCCL_SUCCESS) checked = check_data(function, target, count, type);
    if (checked == HCCL_SUCCESS && (what == ALL_REDUCE || what == REDUCE_SCATTER))
        checked = check_reduction(function, type, (HcclReduceOp)op);
    if (checked == HCCL_SUCCESS && at >= comm->size)
        checked = refuse(HCCL_E_PARA, "%s: there is no root %u in %s of %u ranks", function, at,
                         kinds[what], comm->size);
    if (checked != HCCL_SUCCESS) return checked;
    operation like = {.source = source, .target = target};
    like.head.count = count;
    like.head.type = (uint32_t)type;
    like.head.op = op;
    like.head.root = at;
    return put(comm, function, what, NULL, 0, like, stream);
}

HcclResult HcclAllReduce(void *source, void *target, uint64_t count, HcclDataType type,
                         HcclReduceOp op, HcclComm comm, aclrtStream stream) {
    return put_collective(__func__, ALL_REDUCE, source, target, count, type, op, 0, comm, stream);
}

HcclResult HcclReduceScatter(void *source, void *target, uint64_t count, HcclDataType type,
                             HcclReduceOp op, HcclComm comm, aclrtStream stream) {
    return put_collective(__func__, REDUCE_SCATTER, source, target, count, type, op, 0, comm,
                          stream);
}

HcclResult HcclAllGather(void *source, void *target, uint64_t count, HcclDataType type,
                         HcclComm comm, aclrtStream stream) {
    return put_collective(__func__, ALL_GATHER, source, target, count, type, 0, 0, comm, stream);
}

HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType type, uint32_t at, HcclComm comm,
                         aclrtStream stream) {
    return put_collective(__func__, BROADCAST, data, data, count, type, 0, at, comm, stream);
}
