/* Streams and events of the mock, as the library itself uses them. */
#ifndef MOCK_RUNTIME_H
#define MOCK_RUNTIME_H

#include "hccl.h"

/* Put work behind all that is on the stream; its result is an HcclResult. */
void mock_enqueue(aclrtStream stream, HcclResult (*work)(void *), void *argument);
int mock_is_stream(aclrtStream stream);
HcclResult mock_device_error(void);

#endif
