/* Device memory, host memory and virtual memory over this process's memory. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"

enum { PAGE = 4096 };
static size_t used[MAX_DEVICES];
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

static int charge(int device, size_t bytes) {
  pthread_mutex_lock(&memory_lock);
  int fits = used[device] + bytes <= device_bytes();
  if (fits) used[device] += bytes;
  pthread_mutex_unlock(&memory_lock);
  return fits;
}

static void refund(int device, size_t bytes) {
  pthread_mutex_lock(&memory_lock);
  used[device] -= bytes;
  pthread_mutex_unlock(&memory_lock);
}

/* ---- lists of address ranges ---- */

struct range {
  char *base;
  size_t bytes;
  struct range *next;
};
static struct range *reserved_ranges, *mapped_ranges, *pinned_ranges;

static void push(struct range **list, void *base, size_t bytes) {
  struct range *r = malloc(sizeof *r);
  r->base = base;
  r->bytes = bytes;
  pthread_mutex_lock(&memory_lock);
  r->next = *list;
  *list = r;
  pthread_mutex_unlock(&memory_lock);
}

/* Takes a range off a list; its bytes, or 0 where the list does not have it. */
static size_t pop(struct range **list, void *base) {
  size_t bytes = 0;
  pthread_mutex_lock(&memory_lock);
  for (struct range **p = list; *p; p = &(*p)->next)
    if ((*p)->base == (char *)base) {
      struct range *r = *p;
      bytes = r->bytes;
      *p = r->next;
      free(r);
      break;
    }
  pthread_mutex_unlock(&memory_lock);
  return bytes;
}

static int holds(struct range *list, const void *ptr) {
  int found = 0;
  pthread_mutex_lock(&memory_lock);
  for (struct range *r = list; r && !found; r = r->next)
    found = (const char *)ptr >= r->base && (const char *)ptr < r->base + r->bytes;
  pthread_mutex_unlock(&memory_lock);
  return found;
}

/* ---- device memory ----
   Each allocation is one mapping: a header page, then the memory handed out.
   Pages are not backed until they are touched, so a large device costs nothing. */

struct header {
  size_t bytes;
  int device;
};

API aclError aclrtMalloc(void **out, size_t size, int policy) {
  (void)policy;
  *out = NULL;
  if (!size) return BAD_PARAM;
  if (!charge(current_device, size)) return NO_MEMORY;
  char *base = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    refund(current_device, size);
    return NO_MEMORY;
  }
  *(struct header *)base = (struct header){.bytes = size, .device = current_device};
  *out = base + PAGE;
  return OK;
}

API aclError aclrtMallocAlign32(void **out, size_t size, int policy) {
  return aclrtMalloc(out, size, policy);
}

API aclError aclrtFree(void *ptr) {
  if (!ptr) return OK;
  drain_all();
  char *base = (char *)ptr - PAGE;
  struct header h = *(struct header *)base;
  refund(h.device, h.bytes);
  munmap(base, h.bytes + PAGE);
  return OK;
}

/* attribute is the kind of memory (HBM, DDR, ...): one pool here. */
API aclError aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total) {
  (void)attribute;
  *total = device_bytes();
  *free_bytes = *total - used[current_device];
  return OK;
}

/* ---- host memory ---- */

API aclError aclrtMallocHost(void **out, size_t size) {
  size = size ? size : 1;
  if (posix_memalign(out, 64, size)) return NO_MEMORY;
  push(&pinned_ranges, *out, size);
  return OK;
}

API aclError aclrtMallocHostWithCfg(void **out, uint64_t size, void *config) {
  (void)config;
  return aclrtMallocHost(out, size);
}

API aclError aclrtFreeHost(void *ptr) {
  drain_all();
  pop(&pinned_ranges, ptr);
  free(ptr);
  return OK;
}

API aclError aclrtHostRegister(void *ptr, uint64_t bytes, int type, void **device) {
  (void)type;
  push(&pinned_ranges, ptr, bytes);
  if (device) *device = ptr;
  return OK;
}

API aclError aclrtHostUnregister(void *ptr) {
  pop(&pinned_ranges, ptr);
  return OK;
}

/* The second word is the location: 0 pinned host memory, 2 not registered. Device
   memory is not told apart: torch_npu asks about host pointers only. */
API aclError aclrtPointerGetAttributes(const void *ptr, uint32_t *attributes) {
  memset(attributes, 0, 7 * sizeof *attributes);
  attributes[1] = holds(pinned_ranges, ptr) ? 0 : 2;
  return OK;
}

/* ---- copies that are done on return ---- */

API aclError aclrtMemcpy(void *dst, size_t max, const void *src, size_t bytes, int kind) {
  (void)kind;
  if (bytes > max) return BAD_PARAM;
  memmove(dst, src, bytes);
  return OK;
}

API aclError aclrtMemset(void *dst, size_t max, int32_t value, size_t bytes) {
  if (bytes > max) return BAD_PARAM;
  memset(dst, value, bytes);
  return OK;
}

/* ---- virtual memory (PYTORCH_NPU_ALLOC_CONF=expandable_segments:True) ----
   Address ranges are PROT_NONE mappings; physical blocks are memfds mapped into them. */

struct physical {
  int fd, device;
  size_t bytes;
};

static void *inaccessible(void *at, size_t bytes, int fixed) {
  return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}

API aclError aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *expected,
                                    uint64_t flags) {
  (void)alignment, (void)expected, (void)flags;
  void *p = inaccessible(NULL, size, 0);
  if (p == MAP_FAILED) return NO_MEMORY;
  push(&reserved_ranges, p, size);
  *out = p;
  return OK;
}

API aclError aclrtReleaseMemAddress(void *ptr) {
  size_t bytes = pop(&reserved_ranges, ptr);
  if (bytes) munmap(ptr, bytes);
  return OK;
}

API aclError aclrtMallocPhysical(void **handle, size_t size, const void *prop, uint64_t flags) {
  (void)prop, (void)flags;
  if (!charge(current_device, size)) return NO_MEMORY;
  struct physical *p = malloc(sizeof *p);
  *p = (struct physical){
      .fd = memfd_create("stub-npu", 0), .device = current_device, .bytes = size};
  if (p->fd < 0 || ftruncate(p->fd, (off_t)size)) {
    if (p->fd >= 0) close(p->fd);
    refund(p->device, size);
    free(p);
    return NO_MEMORY;
  }
  *handle = p;
  return OK;
}

API aclError aclrtFreePhysical(void *handle) {
  struct physical *p = handle;
  refund(p->device, p->bytes);
  close(p->fd);
  free(p);
  return OK;
}

API aclError aclrtMapMem(void *at, size_t size, size_t offset, void *handle, uint64_t flags) {
  (void)flags;
  int fd = ((struct physical *)handle)->fd;
  void *p = mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, (off_t)offset);
  if (p == MAP_FAILED) return NO_MEMORY;
  push(&mapped_ranges, at, size);
  return OK;
}

API aclError aclrtUnmapMem(void *at) {
  drain_all();
  size_t bytes = pop(&mapped_ranges, at);
  if (bytes) inaccessible(at, bytes, MAP_FIXED);
  return OK;
}
