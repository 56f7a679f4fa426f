/* Process, devices, contexts, versions, and options of the compiler. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime.h"

/* ---- settings ---- */

long env_long(const char *name, long fallback) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : fallback;
}

const char *env_text(const char *name, const char *fallback) {
  const char *text = getenv(name);
  return text && *text ? text : fallback;
}

int device_count(void) {
  long n = env_long("STUB_CANN_DEVICES", 1);
  return n < 0 ? 0 : n > MAX_DEVICES ? MAX_DEVICES : (int)n;
}

size_t device_bytes(void) { return (size_t)env_long("STUB_CANN_MEM_MB", 65536) << 20; }

/* Called by each generated function that does nothing. */
API void stub_cann_trace(const char *name) {
  static int on = -1;
  if (on < 0) on = (int)env_long("STUB_CANN_TRACE", 0);
  if (on) fprintf(stderr, "[stub-cann] %s -> 0\n", name);
}

/* ---- process, device, context ---- */

__thread int current_device = 0;
static char contexts[MAX_DEVICES]; /* only their addresses matter */

API aclError aclInit(const char *config) {
  (void)config;
  return OK;
}

API aclError aclFinalize(void) { return OK; }

API const char *aclrtGetSocName(void) { return env_text("STUB_CANN_SOC", "Ascend910B2"); }

API const char *aclGetRecentErrMsg(void) { return ""; }

API void aclAppLog(int level, const char *function, const char *file, uint32_t line,
                   const char *format, ...) {
  (void)level, (void)function, (void)file, (void)line, (void)format;
}

API aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = (uint32_t)device_count();
  return OK;
}

API aclError aclrtSetDevice(int32_t id) {
  if (id < 0 || id >= device_count()) return BAD_PARAM;
  current_device = id;
  return OK;
}

API aclError aclrtGetDevice(int32_t *id) {
  *id = current_device;
  return OK;
}

API aclError aclrtResetDevice(int32_t id) {
  (void)id;
  return OK;
}

API aclError aclrtGetCurrentContext(void **context) {
  *context = &contexts[current_device];
  return OK;
}

API aclError aclrtSetCurrentContext(void *context) {
  long id = (char *)context - contexts;
  if (id < 0 || id >= device_count()) return BAD_PARAM;
  current_device = (int)id;
  return OK;
}

API aclError aclrtGetPrimaryCtxState(int32_t id, uint32_t *flags, int32_t *active) {
  (void)id;
  if (flags) *flags = 0;
  if (active) *active = 1;
  return OK;
}

API aclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic) {
  *logic = user;
  return OK;
}

API aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b) {
  *can = a != b;
  return OK;
}

API aclError aclrtDeviceGetBareTgid(int32_t *pid) {
  *pid = (int32_t)getpid();
  return OK;
}

API aclError aclrtPeekAtLastError(int level) {
  (void)level;
  return OK;
}

API aclError aclrtGetLastError(int level) {
  (void)level;
  return OK;
}

/* ---- capabilities: the numbers of an Ascend910B2 ---- */

enum { CUBE_CORES = 24, VECTOR_CORES = 48 };
static const int64_t L2_BYTES = 192ll << 20;

/* info: 0 AI cores, 1 vector cores, 2 bytes of L2. */
API aclError aclGetDeviceCapability(uint32_t id, int info, int64_t *value) {
  (void)id;
  *value = info == 0 ? CUBE_CORES : info == 1 ? VECTOR_CORES : info == 2 ? L2_BYTES : 0;
  return OK;
}

API aclError aclrtGetDeviceInfo(uint32_t id, int attribute, int64_t *value) {
  (void)id;
  switch (attribute) {
    case 101: /* AI cores */
    case 102: /* cube cores */
      *value = CUBE_CORES;
      break;
    case 201:
      *value = VECTOR_CORES;
      break;
    case 301:
      *value = (int64_t)device_bytes();
      break;
    case 302:
      *value = L2_BYTES;
      break;
    default:
      *value = 0;
  }
  return OK;
}

/* type: 0 cube cores, 1 vector cores. */
static aclError core_limit(int type, uint32_t *value) {
  *value = type == 0 ? CUBE_CORES : VECTOR_CORES;
  return OK;
}

API aclError aclrtGetDeviceResLimit(int32_t id, int type, uint32_t *value) {
  (void)id;
  return core_limit(type, value);
}

API aclError aclrtGetStreamResLimit(void *stream, int type, uint32_t *value) {
  (void)stream;
  return core_limit(type, value);
}

API aclError aclrtGetResInCurrentThread(int type, uint32_t *value) {
  return core_limit(type, value);
}

/* Attributes: 0 inf/nan mode, 1 bf16, 2 JIT compilation (answer: no). */
API aclError aclGetCannAttributeList(const int **list, size_t *count) {
  static const int attributes[] = {0, 1};
  *list = attributes;
  *count = 2;
  return OK;
}

API aclError aclGetCannAttribute(int attribute, int32_t *value) {
  *value = attribute < 2;
  return OK;
}

/* ---- versions ---- */

static const char *cann_version(void) { return env_text("STUB_CANN_VERSION", "9.1.0"); }

API aclError aclsysGetVersionStr(char *package, char *version) {
  (void)package;
  snprintf(version, 128, "%s", cann_version());
  return OK;
}

struct package_version {
  char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
};

API aclError aclsysGetCANNVersion(int package, struct package_version *v) {
  (void)package;
  memset(v, 0, sizeof *v);
  snprintf(v->version, sizeof v->version, "%s", cann_version());
  sscanf(v->version, "%63[^.].%63[^.].%63s", v->major, v->minor, v->release);
  return OK;
}

/* ---- options of the op compiler ---- */

API size_t aclGetCompileoptSize(int option) {
  (void)option;
  return 8;
}

API aclError aclGetCompileopt(int option, char *value, size_t length) {
  (void)option;
  snprintf(value, length, "disable");
  return OK;
}

API aclError aclSetCompileopt(int option, const char *value) {
  (void)option, (void)value;
  return OK;
}

API aclError aclrtGetSysParamOpt(int option, int64_t *value) {
  (void)option;
  *value = 0;
  return OK;
}

/* ---- compute: there is none, and saying so beats pretending success ---- */

API aclError aclopCompileAndExecute(void) { return OP_NOT_FOUND; }
API aclError aclopCompileAndExecuteV2(void) { return OP_NOT_FOUND; }
API aclError rtKernelLaunch(void) { return OP_NOT_FOUND; }
API aclError aclrtLaunchKernelWithHostArgs(void) { return OP_NOT_FOUND; }
