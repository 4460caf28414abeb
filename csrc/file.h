/* Files that are replaced whole or not at all, and files that are read with care.
 *
 * Writing: a temporary file in the folder of the target, then fsync, rename, fsync of the folder. It is named
 * .ds4-<hash of the target's name>-<unique>.tmp, has mode 0600, and is locked (flock) for as long as its writer lives: so the next save to
 * the same target knows those that a dead writer left, and removes them.
 *
 * Reading: pread, not a mapping. A file that another program cuts while it is mapped ends the process with SIGBUS; here it is an error. */
#ifndef DS4_FILE_H
#define DS4_FILE_H

#include "internal.h"

typedef struct ds4_file {
  ds4_engine *engine; /* whose failure injection counts */
  const char *path;   /* borrowed */
  const char *base;   /* the last part of path */
  int fd, dir;        /* -1: not open */
  char temp[64];      /* name of the temporary file; "": none */
} ds4_file;

/* The end of a path that is too long for an error sentence. */
const char *ds4_file_shown(const char *path);

int ds4_file_create(ds4_file *f, ds4_engine *e, const char *path, ds4_error *err);
int ds4_file_write(ds4_file *f, uint64_t at, const void *data, uint64_t n, ds4_error *err);
int ds4_file_publish(ds4_file *f, ds4_error *err); /* durable under its name when this returns DS4_OK */
int ds4_file_open(ds4_file *f, ds4_engine *e, const char *path, uint64_t *size, ds4_error *err);
int ds4_file_read(ds4_file *f, uint64_t at, void *data, uint64_t n, ds4_error *err); /* DS4_ECORRUPT when the file ends before */
void ds4_file_close(ds4_file *f);                                                    /* removes a file that was not published */

#endif
