/* Durable replacement of one file, and careful reading. The rules are in file.h. */
#define _DEFAULT_SOURCE
#define _FILE_OFFSET_BITS 64
#include "file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "snapshots may be larger than 2 GiB");

#define SHOWN 200
const char *ds4_file_shown(const char *path) { return strlen(path) > SHOWN ? path + strlen(path) - SHOWN : path; }

/* `what` is the operation that failed with errno. */
static int failed(const ds4_file *f, const char *what, ds4_error *err) {
  int code = errno;
  const char *then = f->temp[0] ? "the file is as it was; make room or choose another place" : "check the path and its permissions";
  return ds4_fail(err, DS4_EIO, code, 0, "%s: %s failed: %s; %s", ds4_file_shown(f->path), what, strerror(code), then);
}

static int not_plain(const ds4_file *f, const char *what, int code, ds4_error *err) {
  return ds4_fail(err, DS4_EIO, code, 0, "%s: this is %s; a snapshot is a plain file, give another path", ds4_file_shown(f->path), what);
}

/* Failure injection: true, with errno set, when the operation that comes next has to fail. */
static bool hit(const ds4_file *f, int kind) {
  if (!ds4_fault_hit(&f->engine->faults, kind)) return false;
  errno = EIO;
  return true;
}

void ds4_file_close(ds4_file *f) {
  if (f->temp[0]) unlinkat(f->dir, f->temp, 0);
  if (f->fd >= 0) close(f->fd);
  if (f->dir >= 0) close(f->dir);
  f->fd = f->dir = -1;
  f->temp[0] = 0;
}

/* ---- writing ---------------------------------------------------------------------------------------------------------------------- */

static bool same_file(int dir, const char *name, const struct stat *held) {
  struct stat now;
  return !fstatat(dir, name, &now, AT_SYMLINK_NOFOLLOW) && now.st_ino == held->st_ino && now.st_dev == held->st_dev;
}

/* Removes temporary files of this target whose writer is gone: a living one holds the lock. What cannot be removed is left alone. */
static void remove_stale(const ds4_file *f, const char *prefix) {
  int copy = dup(f->dir);
  DIR *d = copy < 0 ? NULL : fdopendir(copy);
  if (!d) {
    if (copy >= 0) close(copy);
    return;
  }
  for (struct dirent *entry; (entry = readdir(d));) {
    if (strncmp(entry->d_name, prefix, strlen(prefix))) continue;
    int fd = openat(f->dir, entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    struct stat held;
    if (fd < 0) continue;
    if (!fstat(fd, &held) && S_ISREG(held.st_mode) && !flock(fd, LOCK_EX | LOCK_NB) && same_file(f->dir, entry->d_name, &held))
      unlinkat(f->dir, entry->d_name, 0);
    close(fd);
  }
  closedir(d);
}

/* Makes and locks the temporary file. Another save may take it for a stale one in between: then the next name is tried. */
static int make_temp(ds4_file *f, const char *prefix, ds4_error *err) {
  for (unsigned attempt = 0; attempt < 100; attempt++) {
    struct timespec t;
    struct stat held;
    clock_gettime(CLOCK_REALTIME, &t);
    snprintf(f->temp, sizeof f->temp, "%s%llx-%lx-%x.tmp", prefix,
             (unsigned long long)t.tv_sec * 1000000000u + (unsigned long long)t.tv_nsec, (unsigned long)getpid(), attempt);
    f->fd = hit(f, DS4_FAULT_WRITE) ? -1 : openat(f->dir, f->temp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (f->fd < 0) f->temp[0] = 0;
    if (f->fd < 0 && errno == EEXIST) continue;
    if (f->fd < 0) return failed(f, "creating a temporary file beside it", err);
    flock(f->fd, LOCK_EX); /* a file system without locks: then nobody can take the file for a stale one either */
    if (!fstat(f->fd, &held) && same_file(f->dir, f->temp, &held)) return DS4_OK;
    close(f->fd);
    f->fd = -1;
    f->temp[0] = 0;
  }
  errno = EEXIST;
  return failed(f, "creating a temporary file beside it", err);
}

/* Opens the folder of `path` and points `base` to the last part of it. */
static int open_folder(ds4_file *f, ds4_error *err) {
  const char *slash = strrchr(f->path, '/');
  f->base = slash ? slash + 1 : f->path;
  uint64_t n = slash ? (uint64_t)(slash - f->path) : 1;
  char *folder = ds4_alloc(f->engine, n + 2);
  if (!folder) return ds4_fail(err, DS4_ENOMEM, 0, 0, "the system refused memory for a path; nothing has changed");
  memcpy(folder, slash && n ? f->path : slash ? "/" : ".", n ? n : 1);
  f->dir = hit(f, DS4_FAULT_WRITE) ? -1 : open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  free(folder);
  return f->dir < 0 ? failed(f, "opening its folder", err) : DS4_OK;
}

/* Opens a temporary file that will replace `path`. On an error nothing is left behind; otherwise the caller ends with ds4_file_close. */
int ds4_file_create(ds4_file *f, ds4_engine *e, const char *path, ds4_error *err) {
  *f = (ds4_file){.engine = e, .path = path, .fd = -1, .dir = -1};
  char prefix[32];
  struct stat old;
  uint64_t name = 0xcbf29ce484222325u; /* FNV-1a, so that the name of any target fits */
  int status = open_folder(f, err);
  for (const char *c = f->base; *c; c++) name = (name ^ (uint8_t)*c) * 0x100000001b3u;
  snprintf(prefix, sizeof prefix, ".ds4-%016llx-", (unsigned long long)name);
  if (!status && (!f->base[0] || !strcmp(f->base, ".") || !strcmp(f->base, ".."))) status = not_plain(f, "a folder", EISDIR, err);
  if (!status && !fstatat(f->dir, f->base, &old, 0) && !S_ISREG(old.st_mode))
    status = S_ISDIR(old.st_mode) ? not_plain(f, "a folder", EISDIR, err) : not_plain(f, "a device or a pipe", EINVAL, err);
  if (!status) {
    remove_stale(f, prefix);
    status = make_temp(f, prefix, err);
  }
  if (status) ds4_file_close(f);
  return status;
}

int ds4_file_write(ds4_file *f, uint64_t at, const void *data, uint64_t n, ds4_error *err) {
  const uint8_t *p = data;
  while (n) {
    ssize_t done = hit(f, DS4_FAULT_WRITE) ? -1 : pwrite(f->fd, p, n > 1u << 30 ? 1u << 30 : n, (off_t)at);
    if (done < 0 && errno == EINTR) continue;
    if (done == 0) errno = ENOSPC;
    if (done <= 0) return failed(f, "writing", err);
    p += done;
    at += (uint64_t)done;
    n -= (uint64_t)done;
  }
  return DS4_OK;
}

static int sync_fd(const ds4_file *f, int fd) {
  if (hit(f, DS4_FAULT_WRITE)) return -1;
#ifdef F_FULLFSYNC /* macOS: fsync alone leaves the bytes in the drive's cache */
  if (!fcntl(fd, F_FULLFSYNC)) return 0;
#endif
  int result;
  do result = fsync(fd);
  while (result && errno == EINTR);
  return result;
}

int ds4_file_publish(ds4_file *f, ds4_error *err) {
  if (sync_fd(f, f->fd)) return failed(f, "fsync", err);
  if (hit(f, DS4_FAULT_WRITE) || renameat(f->dir, f->temp, f->dir, f->base)) return failed(f, "renaming the finished file", err);
  f->temp[0] = 0;
  if (sync_fd(f, f->dir) && errno != EINVAL && errno != ENOTSUP) { /* some file systems cannot sync a folder */
    int code = errno;
    return ds4_fail(err, DS4_EIO, code, 0,
                    "%s: fsync of its folder failed: %s; the new snapshot is whole, but may not survive a power failure: save again",
                    ds4_file_shown(f->path), strerror(code));
  }
  return DS4_OK;
}

/* ---- reading ---------------------------------------------------------------------------------------------------------------------- */

int ds4_file_open(ds4_file *f, ds4_engine *e, const char *path, uint64_t *size, ds4_error *err) {
  *f = (ds4_file){.engine = e, .path = path, .fd = -1, .dir = -1};
  struct stat st;
  int status = DS4_OK;
  f->fd = hit(f, DS4_FAULT_READ) ? -1 : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* a pipe must not hold the call up */
  if (f->fd < 0 || hit(f, DS4_FAULT_READ) || fstat(f->fd, &st))
    status = failed(f, "opening", err);
  else if (!S_ISREG(st.st_mode))
    status = S_ISDIR(st.st_mode) ? not_plain(f, "a folder", EISDIR, err) : not_plain(f, "a device or a pipe", EINVAL, err);
  else
    *size = (uint64_t)st.st_size;
  if (status) ds4_file_close(f);
  return status;
}

int ds4_file_read(ds4_file *f, uint64_t at, void *data, uint64_t n, ds4_error *err) {
  uint8_t *p = data;
  while (n) {
    ssize_t done = hit(f, DS4_FAULT_READ) ? -1 : pread(f->fd, p, n > 1u << 30 ? 1u << 30 : n, (off_t)at);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return failed(f, "reading", err);
    if (!done)
      return ds4_fail(err, DS4_ECORRUPT, (int64_t)at, 0,
                      "%s: the snapshot was cut to %llu bytes while it was read; evaluate the tokens again", ds4_file_shown(f->path),
                      (unsigned long long)at);
    p += done;
    at += (uint64_t)done;
    n -= (uint64_t)done;
  }
  return DS4_OK;
}
