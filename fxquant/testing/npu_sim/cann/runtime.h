/* Shared by the parts of the simulated Ascend runtime. */
#ifndef FXQUANT_NPU_SIM_RUNTIME_H
#define FXQUANT_NPU_SIM_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

typedef int aclError;
enum { OK = 0, BAD_PARAM = 107000, OP_NOT_FOUND = 100024, NO_MEMORY = 207001 };
enum { MAX_DEVICES = 16 };

/* What the stubs export; everything else stays inside of the library. */
#define API __attribute__((visibility("default")))

/* Settings, from the environment (see settings.py). */
long env_long(const char *name, long fallback);
const char *env_text(const char *name, const char *fallback);
int device_count(void);
size_t device_bytes(void);

/* The device of the calling thread. */
extern __thread int current_device;

/* Waits until every stream has done what it was given. */
void drain_all(void);

#endif
