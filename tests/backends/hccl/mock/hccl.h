/* The part of HCCL's public interface that the mock offers: prototypes, codes and layouts, written
 * from the vendor's documentation, so that a compiler checks the mock against them. */
#ifndef MOCK_HCCL_H
#define MOCK_HCCL_H

#include <stddef.h>
#include <stdint.h>

typedef void *HcclComm;
typedef void *aclrtStream;

typedef enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_PTR = 2,
    HCCL_E_MEMORY = 3,
    HCCL_E_INTERNAL = 4,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_UNAVAIL = 7,
    HCCL_E_SYSCALL = 8,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_REMOTE = 21,
} HcclResult;

typedef enum {
    HCCL_DATA_TYPE_INT8 = 0,
    HCCL_DATA_TYPE_INT16 = 1,
    HCCL_DATA_TYPE_INT32 = 2,
    HCCL_DATA_TYPE_FP16 = 3,
    HCCL_DATA_TYPE_FP32 = 4,
    HCCL_DATA_TYPE_INT64 = 5,
    HCCL_DATA_TYPE_UINT64 = 6,
    HCCL_DATA_TYPE_UINT8 = 7,
    HCCL_DATA_TYPE_UINT16 = 8,
    HCCL_DATA_TYPE_UINT32 = 9,
    HCCL_DATA_TYPE_FP64 = 10,
    HCCL_DATA_TYPE_BFP16 = 11,
} HcclDataType;

typedef enum {
    HCCL_REDUCE_SUM = 0,
    HCCL_REDUCE_PROD = 1,
    HCCL_REDUCE_MAX = 2,
    HCCL_REDUCE_MIN = 3,
} HcclReduceOp;

typedef enum { HCCL_SEND = 0, HCCL_RECV = 1 } HcclSendRecvType;

typedef struct {
    char internal[4108];
} HcclRootInfo;

typedef struct {
    HcclSendRecvType sendRecvType;
    void *buf;
    uint64_t count;
    HcclDataType dataType;
    uint32_t remoteRank;
} HcclSendRecvItem;

_Static_assert(sizeof(HcclRootInfo) == 4108, "HcclRootInfo");
_Static_assert(sizeof(HcclSendRecvItem) == 32, "HcclSendRecvItem");
_Static_assert(offsetof(HcclSendRecvItem, buf) == 8, "HcclSendRecvItem.buf");
_Static_assert(offsetof(HcclSendRecvItem, count) == 16, "HcclSendRecvItem.count");
_Static_assert(offsetof(HcclSendRecvItem, dataType) == 24, "HcclSendRecvItem.dataType");
_Static_assert(offsetof(HcclSendRecvItem, remoteRank) == 28, "HcclSendRecvItem.remoteRank");

HcclResult HcclGetRootInfo(HcclRootInfo *rootInfo);
HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank,
                                HcclComm *comm);
HcclResult HcclCommDestroy(HcclComm comm);
HcclResult HcclGetRankSize(HcclComm comm, uint32_t *rankSize);
HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank);
HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *asyncError);
const char *HcclGetErrorString(HcclResult code);

HcclResult HcclSend(void *sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank,
                    HcclComm comm, aclrtStream stream);
HcclResult HcclRecv(void *recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank,
                    HcclComm comm, aclrtStream stream);
HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t itemNum, HcclComm comm,
                             aclrtStream stream);
HcclResult HcclAllReduce(void *sendBuf, void *recvBuf, uint64_t count, HcclDataType dataType,
                         HcclReduceOp op, HcclComm comm, aclrtStream stream);
HcclResult HcclReduceScatter(void *sendBuf, void *recvBuf, uint64_t recvCount,
                             HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                             aclrtStream stream);
HcclResult HcclAllGather(void *sendBuf, void *recvBuf, uint64_t sendCount, HcclDataType dataType,
                         HcclComm comm, aclrtStream stream);
HcclResult HcclBroadcast(void *buf, uint64_t count, HcclDataType dataType, uint32_t root,
                         HcclComm comm, aclrtStream stream);

/* What stands in for the runtime's streams and events, and what tests ask. All return 0, or the
 * first error of the device. */
aclrtStream mockStreamCreate(void);
int mockStreamSynchronize(aclrtStream stream);
void *mockEventCreate(void);
int mockEventRecord(void *event, aclrtStream stream);
int mockStreamWaitEvent(aclrtStream stream, void *event);
int mockEventQuery(void *event); /* 1: passed, 0: not yet, -1: the device has failed */
int mockEventSynchronize(void *event);
/* Between begin and end, operations are kept and not carried out; each replay does them again. */
void mockCaptureBegin(void);
void mockCaptureEnd(void);
int mockCaptured(void); /* how many have been kept so far, by all captures */
void mockReplay(int first, int last);

uint64_t mockCalls(const char *function);
const char *mockLastError(void);

#endif
