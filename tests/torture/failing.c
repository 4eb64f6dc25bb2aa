/* A disk that fails at one system call, for `write_errors.py`: loaded before the C
 * library (LD_PRELOAD), armed through `fail_at`. Calls on files below one folder are
 * counted; the nth fails with the given error, and a full disk stays full. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static long at = -1, calls;
static int error, stays;
static int inside; /* our own readlink is no call of the program */

void fail_at(const char *below, long nth, int number, int for_ever) {
  snprintf(folder, sizeof folder, "%s", below);
  calls = 0;
  error = number;
  stays = for_ever;
  at = nth;
}

long calls_so_far(void) { return calls; }

static int fails(void) {
  long now = __sync_fetch_and_add(&calls, 1);
  return at >= 0 && (now == at || (stays && now > at));
}

static int concerns_path(const char *path) {
  return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int concerns(int descriptor) {
  char link[64], path[4096];
  ssize_t length;
  if (!folder[0] || inside) return 0;
  inside = 1;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  length = readlink(link, path, sizeof path - 1);
  inside = 0;
  if (length <= 0) return 0;
  path[length] = 0;
  return concerns_path(path);
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define FAILING(type, name, parameters, values, descriptor) \
  type name parameters { \
    REAL(name); \
    if (concerns(descriptor) && fails()) { errno = error; return -1; } \
    return real values; \
  }

FAILING(ssize_t, write, (int fd, const void *data, size_t n), (fd, data, n), fd)
FAILING(ssize_t, pwrite, (int fd, const void *data, size_t n, off_t o), (fd, data, n, o), fd)
FAILING(ssize_t, pwrite64, (int fd, const void *data, size_t n, off_t o), (fd, data, n, o), fd)
FAILING(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), fd)
FAILING(int, fsync, (int fd), (fd), fd)
FAILING(int, fdatasync, (int fd), (fd), fd)
FAILING(int, ftruncate, (int fd, off_t length), (fd, length), fd)
FAILING(int, ftruncate64, (int fd, off_t length), (fd, length), fd)

/* The file is closed all the same, as Linux does it. */
int close(int fd) {
  REAL(close);
  int is_ours = concerns(fd) && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
  int failed = is_ours && fails();
  int code = real(fd);
  if (failed) { errno = error; return -1; }
  return code;
}

int rename(const char *from, const char *to) {
  REAL(rename);
  if (concerns_path(to) && fails()) { errno = error; return -1; }
  return real(from, to);
}

#define OPENING(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = va_arg(rest, mode_t); \
    va_end(rest); \
    if ((flags & O_CREAT) && concerns_path(path) && fails()) { errno = error; return -1; } \
    return real(path, flags, mode); \
  }
OPENING(open)
OPENING(open64)
