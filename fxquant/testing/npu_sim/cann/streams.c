/* Streams and events.
   STUB_CANN_ASYNC=0 (default): every command is done when its call returns.
   STUB_CANN_ASYNC=1: each stream runs its commands in order on a thread of its own,
   and a copy takes at least bytes / STUB_CANN_MBPS, so a missing wait shows as stale
   data, as on a card. Kernels drain their stream and run on the calling thread. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime.h"

struct event {
  struct timespec when;
  unsigned long asked, done; /* records asked for, records done */
};

struct command {
  enum { COPY, SET, RECORD, WAIT, CALL } kind;
  void *dst;
  const void *src;
  size_t bytes;
  int value;
  struct event *event;
  unsigned long ticket;
  void (*function)(void *);
  void *arguments;
  struct command *next;
};

struct stream {
  int32_t id, started;
  unsigned long asked, done; /* commands asked for, commands done */
  struct command *first, **last;
  struct stream *next;
};

static int32_t next_stream = 1;
static struct stream null_stream, *streams; /* streams with a thread; never unlinked */
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queue_moved = PTHREAD_COND_INITIALIZER;

static int is_async(void) {
  static int on = -1;
  if (on < 0) on = (int)env_long("STUB_CANN_ASYNC", 0);
  return on;
}

/* ---- commands ---- */

static void copy(struct command *c) {
  long mib_per_s = is_async() ? env_long("STUB_CANN_MBPS", 0) : 0;
  if (mib_per_s > 0) {
    double seconds = (double)c->bytes / ((double)mib_per_s * 1048576.0);
    struct timespec time = {.tv_sec = (time_t)seconds};
    time.tv_nsec = (long)((seconds - (double)time.tv_sec) * 1e9);
    nanosleep(&time, NULL);
  }
  memmove(c->dst, c->src, c->bytes); /* last: who did not wait sees the old bytes */
}

static void record(struct command *c) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  pthread_mutex_lock(&queue_lock);
  c->event->when = now;
  if (c->event->done < c->ticket) c->event->done = c->ticket;
  pthread_cond_broadcast(&queue_moved);
  pthread_mutex_unlock(&queue_lock);
}

static void wait_for(struct event *event, unsigned long ticket) {
  pthread_mutex_lock(&queue_lock);
  while (event->done < ticket) pthread_cond_wait(&queue_moved, &queue_lock);
  pthread_mutex_unlock(&queue_lock);
}

static void execute(struct command *c) {
  switch (c->kind) {
    case COPY:
      copy(c);
      break;
    case SET:
      memset(c->dst, c->value, c->bytes);
      break;
    case CALL:
      c->function(c->arguments);
      break;
    case RECORD:
      record(c);
      break;
    case WAIT:
      wait_for(c->event, c->ticket);
  }
}

/* ---- queues ---- */

static void *worker(void *argument) {
  struct stream *s = argument;
  pthread_mutex_lock(&queue_lock);
  for (;;) {
    while (!s->first) pthread_cond_wait(&queue_moved, &queue_lock);
    struct command *c = s->first;
    if (!(s->first = c->next)) s->last = &s->first;
    pthread_mutex_unlock(&queue_lock);
    execute(c);
    free(c);
    pthread_mutex_lock(&queue_lock);
    s->done++;
    pthread_cond_broadcast(&queue_moved);
  }
  return NULL;
}

static void start(struct stream *s) { /* with the lock held */
  pthread_t thread;
  s->started = 1;
  s->last = &s->first;
  s->next = streams;
  streams = s;
  pthread_create(&thread, NULL, worker, s);
  pthread_detach(thread);
}

static aclError submit(void *stream, struct command command) {
  struct stream *s = stream ? stream : &null_stream;
  if (!is_async()) {
    if (command.kind == RECORD) command.ticket = ++command.event->asked;
    execute(&command);
    return OK;
  }
  struct command *c = malloc(sizeof *c);
  *c = command;
  c->next = NULL;
  pthread_mutex_lock(&queue_lock);
  if (c->kind == RECORD) c->ticket = ++c->event->asked;
  if (c->kind == WAIT) c->ticket = c->event->asked;
  if (!s->started) start(s);
  *s->last = c;
  s->last = &c->next;
  s->asked++;
  pthread_cond_broadcast(&queue_moved);
  pthread_mutex_unlock(&queue_lock);
  return OK;
}

static void drain(struct stream *s) {
  pthread_mutex_lock(&queue_lock);
  for (unsigned long target = s->asked; s->done < target;)
    pthread_cond_wait(&queue_moved, &queue_lock);
  pthread_mutex_unlock(&queue_lock);
}

void drain_all(void) {
  pthread_mutex_lock(&queue_lock);
  struct stream *first = streams; /* later ones are put in front */
  pthread_mutex_unlock(&queue_lock);
  for (struct stream *s = first; s; s = s->next) drain(s);
}

API aclError aclrtSynchronizeDevice(void) {
  drain_all();
  return OK;
}

API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
  (void)timeout;
  return aclrtSynchronizeDevice();
}

API aclError aclrtMemcpyAsync(void *dst, size_t max, const void *src, size_t bytes, int kind,
                              void *stream) {
  (void)kind;
  if (bytes > max) return BAD_PARAM;
  return submit(stream, (struct command){.kind = COPY, .dst = dst, .src = src, .bytes = bytes});
}

API aclError aclrtMemcpyAsyncWithCondition(void *dst, size_t max, const void *src, size_t bytes,
                                           int kind, void *stream) {
  return aclrtMemcpyAsync(dst, max, src, bytes, kind, stream);
}

API aclError aclrtMemsetAsync(void *dst, size_t max, int32_t value, size_t bytes, void *stream) {
  if (bytes > max) return BAD_PARAM;
  return submit(stream, (struct command){.kind = SET, .dst = dst, .value = value, .bytes = bytes});
}

/* ---- streams ---- */

API aclError aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flag) {
  (void)priority, (void)flag;
  struct stream *s = calloc(1, sizeof *s);
  s->id = __sync_fetch_and_add(&next_stream, 1);
  *out = s;
  return OK;
}

API aclError aclrtCreateStream(void **out) { return aclrtCreateStreamWithConfig(out, 0, 0); }

API aclError aclrtDestroyStream(void *stream) { /* kept: the list holds it */
  if (stream) drain(stream);
  return OK;
}

API aclError aclrtDestroyStreamForce(void *stream) { return aclrtDestroyStream(stream); }

API aclError aclrtStreamGetId(void *stream, int32_t *id) {
  *id = stream ? ((struct stream *)stream)->id : 0;
  return OK;
}

API aclError aclrtStreamQuery(void *stream, int *status) {
  struct stream *s = stream ? stream : &null_stream;
  pthread_mutex_lock(&queue_lock);
  *status = s->done == s->asked ? 0 : 1;
  pthread_mutex_unlock(&queue_lock);
  return OK;
}

API aclError aclrtSynchronizeStream(void *stream) {
  drain(stream ? stream : &null_stream);
  return OK;
}

API aclError aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout) {
  (void)timeout;
  return aclrtSynchronizeStream(stream);
}

API aclError aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) {
  (void)stream;
  *flag = 0;
  return OK;
}

/* Graph capture: none is going on. */
API aclError aclmdlRICaptureGetInfo(void *stream, int *status, void **model) {
  (void)stream;
  if (status) *status = 0;
  if (model) *model = NULL;
  return OK;
}

/* ---- events: never freed, since a queued command may still name one ---- */

API aclError aclrtCreateEventExWithFlag(void **out, uint32_t flag) {
  (void)flag;
  *out = calloc(1, sizeof(struct event));
  return OK;
}

API aclError aclrtCreateEventWithFlag(void **out, uint32_t flag) {
  return aclrtCreateEventExWithFlag(out, flag);
}

API aclError aclrtDestroyEvent(void *event) {
  (void)event;
  return OK;
}

API aclError aclrtRecordEvent(void *event, void *stream) {
  return submit(stream, (struct command){.kind = RECORD, .event = event});
}

API aclError aclrtStreamWaitEvent(void *stream, void *event) {
  return submit(stream, (struct command){.kind = WAIT, .event = event});
}

API aclError aclrtSynchronizeEvent(void *event) {
  struct event *e = event;
  pthread_mutex_lock(&queue_lock);
  unsigned long target = e->asked;
  pthread_mutex_unlock(&queue_lock);
  wait_for(e, target);
  return OK;
}

static int is_done(struct event *e) {
  pthread_mutex_lock(&queue_lock);
  int done = e->done == e->asked;
  pthread_mutex_unlock(&queue_lock);
  return done;
}

API aclError aclrtQueryEventStatus(void *event, int *status) {
  *status = is_done(event);
  return OK;
}

API aclError aclrtQueryEventWaitStatus(void *event, int *status) {
  *status = is_done(event) ? 0 : 0xffff;
  return OK;
}

API aclError aclrtEventGetTimestamp(void *event, uint64_t *us) {
  struct timespec t = ((struct event *)event)->when;
  *us = (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
  return OK;
}

API aclError aclrtEventElapsedTime(float *ms, void *from, void *to) {
  struct timespec a = ((struct event *)from)->when, b = ((struct event *)to)->when;
  *ms = (float)((double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6);
  return OK;
}

/* ---- callbacks ---- */

/* The report thread polls for callbacks; sleeping keeps it from spinning. */
API aclError aclrtProcessReport(int32_t timeout) {
  usleep((useconds_t)(timeout > 0 ? timeout : 100) * 1000u);
  return OK;
}

API aclError aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *arguments) {
  struct command c = {.kind = CALL, .function = function, .arguments = arguments};
  return submit(stream, c);
}

API aclError aclrtLaunchCallback(void (*function)(void *), void *arguments, int block,
                                 void *stream) {
  (void)block;
  return aclrtLaunchHostFunc(stream, function, arguments);
}
