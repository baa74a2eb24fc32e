// The entry points of CANN that mean something here: one device, whose memory is the host's and whose work is done
// when it is asked for. All others only have to exist; stub.py writes them.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static int device;
static size_t rounded(size_t bytes) { return (bytes + 1023) / 512 * 512; }  // as CANN promises: 32 bytes past the end
static int allocate(void **out, size_t bytes) { return !(*out = aligned_alloc(512, rounded(bytes))); }
static int make_handle(void **out) { return !(*out = malloc(1)); }

int aclrtGetDeviceCount(unsigned *out) { *out = 1; return 0; }
int aclrtGetDevice(int *out) { *out = device; return 0; }
int aclrtGetCurrentContext(void **out) { *out = &device; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return "none: this is a stub"; }
int aclrtGetSysParamOpt(int option, long *out) { *out = 0; return 0; }
int aclrtCtxGetSysParamOpt(int option, long *out) { *out = 0; return 0; }

int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) { *free_bytes = *total = 64ul << 30; return 0; }
int aclrtMalloc(void **out, size_t bytes, int policy) { return allocate(out, bytes); }
int aclrtMallocAlign32(void **out, size_t bytes, int policy) { return allocate(out, bytes); }
int aclrtMallocHost(void **out, size_t bytes) { return allocate(out, bytes); }
int aclrtFree(void *memory) { free(memory); return 0; }
int aclrtFreeHost(void *memory) { free(memory); return 0; }
int aclrtMemset(void *to, size_t room, int value, size_t bytes) { memset(to, value, bytes); return 0; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) { memcpy(to, from, bytes); return 0; }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    memcpy(to, from, bytes);
    return 0;
}

int aclrtCreateStream(void **out) { return make_handle(out); }
int aclrtCreateStreamWithConfig(void **out, unsigned priority, unsigned flags) { return make_handle(out); }
int aclrtCreateEventExWithFlag(void **out, unsigned flags) { return make_handle(out); }
int aclrtCreateEventWithFlag(void **out, unsigned flags) { return make_handle(out); }
int aclrtEventElapsedTime(float *ms, void *start, void *end) { *ms = 0; return 0; }
int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return 0; }
int aclrtStreamQuery(void *stream, int *status) { *status = 0; return 0; }
